#include "faults/blame.h"
#include "support/catch.h"

using namespace ddpkit::testing;

TEST_CASE("the launcher names the rank that failed first, however it ended", "[faults]") {
  for (const Way& way : kWays) check_blame(way, "shm", 5);
}

TEST_CASE("the launcher names the rank that failed first, even if the backend names none", "[faults][gloo]") {
  for (const Way& way : kWays) check_blame(way, "gloo", 2);
}
