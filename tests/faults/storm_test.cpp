// The long tests.
#include "faults/blame.h"
#include "faults/training.h"
#include "support/catch.h"

TEST_CASE("a run that loses 100 ranks ends with the weights of one never disturbed", "[faults]") {
  ddpkit::testing::kill_and_compare(100, 2);
}

TEST_CASE("a checkpoint that is damaged anywhere is refused and left as it is", "[faults]") {
  ddpkit::testing::damage_checkpoints(20, 20);
}

TEST_CASE("of 100 runs under load the launcher names the first rank to fail in 100", "[faults]") {
  for (const ddpkit::testing::Way& way : ddpkit::testing::kWays) {
    DYNAMIC_SECTION(way.name) { ddpkit::testing::check_blame(way, "shm", 100); }
  }
}
