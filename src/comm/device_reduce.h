// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <vector>

namespace ddpkit {

/// The sum of `parts`, one a device of this process, in the first of them, by NCCL. parts[i] is contiguous and belongs
/// to `streams[i]`, on which its device works for this. False, and nothing done, where there is no NCCL or it has no
/// sum of this type.
bool reduce_over_devices(const std::vector<at::Tensor>& parts, const std::vector<c10::Stream>& streams);

}  // namespace ddpkit
