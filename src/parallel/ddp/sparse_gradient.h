// Tier 1.
#pragma once

#include <ATen/core/Tensor.h>

#include <ddpkit/comm/process_group.h>

namespace ddpkit {

/// Collective. Returns the mean over ranks of sparse COO gradients of `parameter`'s shape, coalesced. Ranks may have
/// different numbers of entries. An undefined gradient counts as zero.
at::Tensor average_sparse(const at::Tensor& gradient, const at::Tensor& parameter, const ProcessGroup& group);

}  // namespace ddpkit
