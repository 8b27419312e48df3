#include <ddpkit/comm/flight_recorder.h>
#include <ddpkit/comm/local_launch.h>
#include <ddpkit/comm/process_group.h>

#include <ATen/ops/ones.h>

#include <algorithm>
#include <cstdlib>

#include "comm/flight/view.h"
#include "support/catch.h"
#include "support/folder.h"

namespace {

constexpr const char* kName = "a rank's last collectives outlive it";

}  // namespace

TEST_CASE("a page that no process has taken says so", "[flight]") {
  const ddpkit::flight::View view;
  CHECK(view.state(false) == "has not come to init_process_group");
  CHECK(view.state(true).empty());
  CHECK(view.history().empty());
  CHECK(view.failure() == ddpkit::flight::Failure::kNone);
  CHECK_FALSE(view.culprit().has_value());
}

TEST_CASE(kName, "[flight]") {
  // In a rank: leaves a history longer than the page.
  if (std::getenv("DDPKIT_TEST_FLIGHT")) {
    const ddpkit::ProcessGroup group = ddpkit::init_process_group({.backend = "shm"});
    ddpkit::note_step(41);
    for (int i = 0; i < 300; ++i) group.all_reduce(at::ones({1024}));
    std::_Exit(group.rank() == 1 ? 3 : 0);
  }
  const ddpkit::testing::Folder logs;
  const auto result = ddpkit::local_launch({.command = {"/proc/self/exe", kName},
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
  CHECK(std::count(history.begin(), history.end(), '\n') == 257);  // 256, and the heading.
}
