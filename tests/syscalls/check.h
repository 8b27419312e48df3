// Training runs in which one system call fails.
#pragma once

#include <cstddef>

namespace ddpkit::testing {

/// Injects failures into system calls of the launcher and of two ranks, each in a separate run: `drawn` of them at
/// random, in the order of the table of calls. Each run must end with the weights of an undisturbed run, or with a
/// non-zero exit code and a sentence that names the call or the reason. The last checkpoint must be readable, and no
/// process may remain.
void check_system_calls(std::size_t drawn);

}  // namespace ddpkit::testing
