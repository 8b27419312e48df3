// Tier 1: ATen/core/Tensor.h. How a batch is cut for replicas, and their outputs are joined.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ddpkit {

/// Where parts begin along dim 0. [part], and the end of the last.
using Cuts = std::vector<std::int64_t>;

/// The size of dim 0 of all tensors that have dimensions. Throws InvalidArgument where they differ. -1: there is none.
std::int64_t batch_size(const std::vector<at::Tensor>& tensors);

/// At most `parts` parts, whose sizes differ by at most one, the larger first; none is empty, unless all is.
Cuts cut(std::int64_t samples, int parts);

/// Part `index` of each tensor, without a graph, on `device` unless that is the CPU; leaves that want a gradient where
/// the tensors do and `gradients`. What has no dimensions is in every part.
std::vector<at::Tensor> part_of(const std::vector<at::Tensor>& tensors, const Cuts& cuts, std::size_t index,
                                bool gradients, c10::Device device);

/// The outputs of all parts, joined along dim 0 where the first part's are, without a graph. Scalars become a vector if
/// `stack`. [output] Throws Error where parts do not have the same number of tensors. `outputs` is [part][output].
std::vector<at::Tensor> joined(const std::vector<std::vector<at::Tensor>>& outputs, bool stack);

/// The part of a gradient of joined output `output` that belongs to `part`.
at::Tensor gradient_part(const at::Tensor& gradient, const std::vector<std::vector<at::Tensor>>& outputs,
                         std::size_t output, std::size_t part);

}  // namespace ddpkit
