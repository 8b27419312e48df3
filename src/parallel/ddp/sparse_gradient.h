// Tier 1.
#pragma once

#include <ATen/core/Tensor.h>

#include <ddpkit/comm/process_group.h>

namespace ddpkit {

/// Collective. The mean over ranks of sparse COO gradients of `parameter`'s shape, coalesced; the ranks' numbers of
/// entries may differ. An undefined gradient counts as zero.
at::Tensor average_sparse(const at::Tensor& gradient, const at::Tensor& parameter, const ProcessGroup& group);

}  // namespace ddpkit
