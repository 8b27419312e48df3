// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace c10d {
class Backend;
}

namespace ddpkit {

/// From the backend's own allocator: with NCCL of ncclMemAlloc, and registered with the communicator, so that its
/// kernels work on it in place. Undefined where there is none; with nccl and several ranks a warning says so, once.
/// Collective. `sizes` are not of nothing.
at::Tensor allocate_registered(c10d::Backend& backend, at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace ddpkit
