#include "support/catch.h"
#include "syscalls/check.h"

TEST_CASE("20 system calls that fail, drawn from all", "[syscalls]") { ddpkit::testing::check_system_calls(20); }
