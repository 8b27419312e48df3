#include <algorithm>
#include <cstdint>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include <fmt/format.h>

#include "faults/training.h"

namespace ddpkit::testing {
std::vector<int> ranks_of(int launcher) {
  std::ifstream children(fmt::format("/proc/{0}/task/{0}/children", launcher));
  std::vector<int> ranks;
  for (int pid = 0; children >> pid;) {
    std::string name;
    std::getline(std::ifstream(fmt::format("/proc/{}/comm", pid)), name);
    if (name == "har") ranks.push_back(pid);
  }
  return ranks;
}

void kill_and_compare(int kills, unsigned seed) {
  const std::vector<std::string> options = {"--epochs", std::to_string(20 + 10 * kills), "--json"};
  const Folder whole, disturbed;
  FaultRun calm(training(whole.path(), options));
  REQUIRE(calm.wait(std::chrono::seconds(600)) == 0);

  // The kills together take less time than the whole run, so that the run is alive at the last kill. A kill comes at
  // any moment between the start of the processes and some epochs later.
  const auto longest_ms = static_cast<std::uint32_t>(std::max(200.0, 900 * calm.seconds() / kills));
  std::mt19937 random(seed);
  FaultRun run(training(disturbed.path(), options, {"--max-restarts", std::to_string(kills)}));
  std::vector<int> last;
  for (int i = 0; i < kills; ++i) {
    std::vector<int> ranks;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while ((ranks = ranks_of(run.pid())).size() < 2 || ranks == last) {
      REQUIRE(std::chrono::steady_clock::now() < deadline);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    last = ranks;
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % longest_ms));
    const int victim = ranks[random() % 2];
    REQUIRE(::kill(victim, SIGKILL) == 0);
    run.wait_for(fmt::format("restart {} of {}", i + 1, kills));
  }
  CHECK(run.wait(std::chrono::seconds(600)) == 0);
  CAPTURE(run.err());
  CHECK(run.orphans() == std::vector<int>());
  CHECK(same_bits(har::testing::weights_of(whole), har::testing::weights_of(disturbed)));
  CHECK(names_in(whole.path()) == names_in(disturbed.path()));
  add_row(fmt::format("{} random kills with restarts", kills), "weights of a run never disturbed, to the bit",
          run.seconds());
}

}  // namespace ddpkit::testing
