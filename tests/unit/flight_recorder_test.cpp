#include <ddpkit/comm/flight_recorder.h>
#include <ddpkit/comm/process_group.h>
#include <ddpkit/launch/launcher.h>

#include <ATen/ops/ones.h>
#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "comm/trace/recorder.h"
#include "comm/trace/view.h"
#include "support/catch.h"
#include "support/folder.h"

namespace {

constexpr const char* kName = "a rank's last collectives outlive it";
constexpr const char* kFailuresName = "the first to be recorded of failures on several threads counts";

}  // namespace

TEST_CASE("a page that no process has taken is reported as unused", "[flight]") {
  const ddpkit::flight::View view;
  CHECK(view.state(false) == "has not come to init_process_group");
  CHECK(view.state(true).empty());
  CHECK(view.history().empty());
  CHECK(view.failure() == ddpkit::flight::Failure::kNone);
  CHECK_FALSE(view.culprit().has_value());
}

TEST_CASE(kName, "[flight]") {
  // In a rank: writes a history that is longer than the page.
  if (std::getenv("DDPKIT_TEST_FLIGHT")) {
    const ddpkit::ProcessGroup group = ddpkit::init_process_group({.backend = "shm"});
    ddpkit::note_step(41);
    for (int i = 0; i < 300; ++i) group.all_reduce(at::ones({1024}));
    std::_Exit(group.rank() == 1 ? 3 : 0);
  }
  const ddpkit::testing::Folder logs;
  const auto result = ddpkit::launch({.command = {"/proc/self/exe", "--in-process", kName},
                                      .ranks = 2,
                                      .environment = {{"DDPKIT_TEST_FLIGHT", "1"}},
                                      .time_limit = std::chrono::seconds(60),
                                      .on_output = [](int, const std::string&) {},
                                      .log_dir = logs.path().string()});
  REQUIRE(result.first_failure.has_value());
  CHECK(result.first_failure->rank == 1);
  CHECK_THAT(result.first_failure->state, ContainsSubstring("at step 41; its last one was all_reduce number"));
  CHECK_THAT(result.first_failure->state, ContainsSubstring("(4096 bytes, group 0)"));
  const std::string history = ddpkit::testing::read_file(logs.path() / "attempt_0" / "1" / "collectives.txt");
  CHECK(std::count(history.begin(), history.end(), '\n') == 257);  // 256 entries and the heading.
}

TEST_CASE(kFailuresName, "[flight]") {
  using ddpkit::flight::Failure;
  using ddpkit::flight::Page;
  // Needs a separate process, because a process has only one recorder. Its page belongs to the test and is cleared for
  // each round.
  if (std::getenv("DDPKIT_TEST_FLIGHT")) {
    const ddpkit::flight::View view;
    ::setenv(ddpkit::flight::kPageVariable, std::to_string(view.descriptor()).c_str(), 1);
    ddpkit::flight::Recorder& recorder = ddpkit::flight::Recorder::of_process();
    REQUIRE(recorder.is_read());
    void* memory = ::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, view.descriptor(), 0);
    REQUIRE(memory != MAP_FAILED);
    constexpr int kRounds = 2000;
    const std::vector<Failure> failures = {Failure::kPeerLost, Failure::kTimeout};
    std::barrier<> all_here(3);
    std::vector<std::thread> threads;
    for (int culprit = 0; culprit < 2; ++culprit)
      threads.emplace_back([&, culprit] {
        for (int round = 0; round < kRounds; ++round) {
          all_here.arrive_and_wait();
          recorder.fail(failures[static_cast<std::size_t>(culprit)], culprit);
          all_here.arrive_and_wait();
        }
      });
    int torn = 0, changed = 0;
    for (int round = 0; round < kRounds; ++round) {
      static_cast<Page*>(memory)->outcome.store({});
      all_here.arrive_and_wait();
      all_here.arrive_and_wait();
      const int culprit = view.culprit().value_or(-1);
      torn += culprit < 0 || view.failure() != failures.at(static_cast<std::size_t>(culprit));
      recorder.fail(Failure::kMismatch, 2);
      changed += view.failure() == Failure::kMismatch || view.culprit() != culprit;
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(torn == 0);
    CHECK(changed == 0);
    return;
  }
  std::string output;
  const auto result = ddpkit::launch({.command = {"/proc/self/exe", "--in-process", kFailuresName},
                                      .ranks = 1,
                                      .environment = {{"DDPKIT_TEST_FLIGHT", "1"}},
                                      .time_limit = std::chrono::seconds(60),
                                      .on_output = [&](int, const std::string& text) { output += text; }});
  INFO(output);
  CHECK(result.exit_code() == 0);
  CHECK_THAT(output, ContainsSubstring("All tests passed"));
}
