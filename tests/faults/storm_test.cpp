// The long forms.
#include "faults/training.h"
#include "support/catch.h"

TEST_CASE("a run that loses 100 ranks ends with the weights of one never disturbed", "[faults]") {
  ddpkit::testing::kill_and_compare(100, 2);
}

TEST_CASE("a checkpoint that is damaged anywhere is refused and left as it is", "[faults]") {
  ddpkit::testing::damage_checkpoints(20, 20);
}
