// The long form: 100 random kills.
#include "faults/training.h"
#include "support/catch.h"

TEST_CASE("a run that loses 100 ranks ends with the weights of one never disturbed", "[faults]") {
  ddpkit::testing::kill_and_compare(100, 2);
}
