// Training runs in which one system call fails.
#pragma once

#include <cstddef>

namespace ddpkit::testing {

/// Lets system calls of the launcher and of two ranks fail, each in a run of its own: `drawn` of them at random, in the
/// order of the table of calls. Each run ends with the weights of an undisturbed one, or with a non-zero exit code and
/// a sentence that names the call or the reason. The last checkpoint can be read, and no process is left.
void check_system_calls(std::size_t drawn);

}  // namespace ddpkit::testing
