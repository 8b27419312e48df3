// Ranks killed at random moments. 10 in a plain run, 200 with DDPKIT_TEST_KILLS=200 (script/test --all).
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>

#include <ddpkit/error.h>

#include "support/catch.h"
#include "support/ranks.h"

namespace {

constexpr int kRanks = 3;

int number_from(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Calls collectives of all sizes until the process is killed.
void work_for_ever(ddpkit::ProcessGroup& group, std::mt19937& random) {
  const torch::Tensor symmetric = group.allocate({1 << 20}, at::kFloat);
  for (std::int64_t round = 0;; ++round) {
    const std::int64_t numel = std::int64_t{1} << (random() % 20);
    switch (random() % 5) {
      case 0:
        group.all_reduce(symmetric.narrow(0, 0, numel));
        break;
      case 1:
        group.all_reduce(torch::ones({numel}));
        break;
      case 2:
        group.all_gather(torch::ones({numel}));
        break;
      case 3: {
        torch::Tensor output = torch::empty({kRanks, numel});
        group.all_to_all(output, torch::ones({kRanks, numel}));
        break;
      }
      default: {
        torch::Tensor tensor = torch::empty({numel});
        const auto send = group.send_async(torch::ones({numel}), (group.rank() + 1) % kRanks);
        group.recv(tensor, (group.rank() + kRanks - 1) % kRanks);
        ddpkit::Work(send).wait();
        break;
      }
    }
  }
}

/// Returns the number of mappings of a group's shared memory and of open descriptors of such memory.
std::size_t shared_memories() {
  constexpr std::string_view kName = "/memfd:ddpkit:";
  std::size_t count = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) count += line.find(kName) != line.npos;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed;  // Ignores the error for the descriptor of the iteration itself.
    count += std::filesystem::read_symlink(entry, closed).string().starts_with(kName);
  }
  return count;
}

}  // namespace

TEST_CASE("ranks killed at random moments are named to the others", "[ranks][shm][kill]") {
  const int kills = number_from("DDPKIT_TEST_KILLS", 10);
  for (int round = 0; round < kills; ++round) {
    const int this_round = number_from("DDPKIT_TEST_ROUND", round);
    std::mt19937 dice(static_cast<unsigned>(this_round));
    const int victim = static_cast<int>(dice() % kRanks);
    const auto delay = std::chrono::microseconds(dice() % 30000);
    ddpkit::testing::on_ranks("ranks killed at random moments are named to the others", kRanks,
                              [&](ddpkit::ProcessGroup& group) {
                                const std::size_t memories = shared_memories();
                                auto inner = std::optional(ddpkit::testing::another_group(group, "inner"));
                                CHECK(shared_memories() > memories);
                                const std::string mark = std::string(std::getenv("DDPKIT_TEST_FOLDER")) + "/killed-at";
                                std::thread killer;
                                if (group.rank() == victim) {
                                  killer = std::thread([&] {
                                    std::this_thread::sleep_for(delay);
                                    std::ofstream(mark) << std::fixed << now_seconds() << std::flush;
                                    ::kill(::getpid(), SIGKILL);
                                  });
                                  killer.detach();
                                }
                                std::mt19937 random(static_cast<unsigned>(this_round));
                                try {
                                  work_for_ever(*inner, random);
                                } catch (const ddpkit::PeerLost& error) {
                                  double killed_at = 0;
                                  std::ifstream(mark) >> killed_at;
                                  std::cout << "known after " << now_seconds() - killed_at << " s: " << error.what()
                                            << std::endl;
                                  CHECK(error.context().rank == victim);
                                  CHECK(now_seconds() - killed_at < 30);
                                  if (const char* log = std::getenv("DDPKIT_TEST_KILL_LOG"))
                                    std::ofstream(log, std::ios::app) << now_seconds() - killed_at << '\n';
                                }
                                // The survivors keep no resource of a group that has ended.
                                inner.reset();
                                CHECK(shared_memories() == memories);
                              },
                              {.doomed = {victim}, .environment = {{"DDPKIT_TEST_ROUND", std::to_string(round)}}});
    if (std::getenv("DDPKIT_TEST_ROUND")) return;  // A rank's process runs its own round alone.
  }
}
