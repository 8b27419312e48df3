#pragma once

namespace ddpkit::schedules {

/// Process id of rank 0; the other ranks' ids follow. No process has such an id.
inline constexpr int kFirstPid = 1 << 28;

/// Ends all mappings.
void forget_memory();

}  // namespace ddpkit::schedules
