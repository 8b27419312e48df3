// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ddpkit/comm/shm_backend.h>

namespace ddpkit {

/// create_shm_backend() for a part of a larger group. Errors count ranks from `first_rank`.
c10::intrusive_ptr<c10d::Backend> create_shm_part(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                  int world_size, std::chrono::milliseconds timeout, int first_rank);

}  // namespace ddpkit
