#include "support/catch.h"
#include "syscalls/check.h"

TEST_CASE("each system call fails in turn", "[syscalls]") { ddpkit::testing::check_system_calls(100'000); }
