// Run with RunOptions::elastic: a new process joins the others instead of a lost rank.
#include "ranks/run_join.h"

using namespace ddpkit::testing;

TEST_CASE("a rank of a run that new ranks join", "[.worker]") { run_join_worker(); }

TEST_CASE("a run that a new rank joins ends as one that resumes with that rank", "[ranks][train][elastic]") {
  const std::string backend = GENERATE("shm", "gloo");
  CAPTURE(backend);
  check_joined_run(backend);
}

TEST_CASE("a new rank gets its part of the state of a sharded optimizer", "[ranks][train][elastic]") {
  check_joined_run("shm", /*sharded=*/true);
}

TEST_CASE("a run continues without a new rank that has ended before it joined", "[ranks][train][elastic]") {
  const std::string backend = GENERATE("shm", "gloo");
  CAPTURE(backend);
  const Folder folder;
  const std::string output = launch_joined(
      backend, folder, 3, {{"TEST_DEATH", "7"}, {"TEST_WAIT", "16"}, {"TEST_SIGNAL", std::to_string(SIGKILL)}});
  CHECK_THAT(output, ContainsSubstring("; 2 ranks continue from step 7\n"));
  CHECK_THAT(output, !ContainsSubstring("no new rank joins"));
  CHECK(ddpkit::train::read_checkpoint_info(folder / "run/checkpoint.pt").epoch == kJoinEpochs);
}

TEST_CASE("a run continues without a new rank that does not answer", "[ranks][train][elastic]") {
  const std::string backend = GENERATE("shm", "gloo");
  CAPTURE(backend);
  const Folder folder;
  const std::string output = launch_joined(
      backend, folder, 3, {{"TEST_DEATH", "7"}, {"TEST_WAIT", "16"}, {"TEST_SIGNAL", std::to_string(SIGSTOP)}});
  CHECK_THAT(output, ContainsSubstring("no new rank joins"));
  CHECK_THAT(output, ContainsSubstring("; 2 ranks continue from step 18\n"));
  CHECK(ddpkit::train::read_checkpoint_info(folder / "run/checkpoint.pt").epoch == kJoinEpochs);
}

TEST_CASE("a run that ends before a new rank has joined does not wait for it", "[ranks][train][elastic]") {
  const std::string backend = GENERATE("shm", "gloo");
  CAPTURE(backend);
  const Folder folder;
  const std::string output = launch_joined(backend, folder, 3, {{"TEST_DEATH", "35"}});
  INFO(output);
  CHECK_THAT(output, ContainsSubstring("; 2 ranks continue from step 35\n"));
  CHECK(ddpkit::train::read_checkpoint_info(folder / "run/checkpoint.pt").epoch == kJoinEpochs);
}
