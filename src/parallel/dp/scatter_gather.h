// Tier 1: ATen/core/Tensor.h. Scatters a batch to replicas and gathers their outputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ddpkit {

/// Start of each chunk along dim 0, and the end of the last chunk. [part]
using ChunkOffsets = std::vector<std::int64_t>;

/// Returns the size of dim 0 of all tensors that have dimensions; -1 if no tensor has dimensions. Throws
/// InvalidArgument if sizes differ.
std::int64_t batch_size(const std::vector<at::Tensor>& tensors);

/// Splits into at most `parts` parts. Sizes differ by at most one, larger parts come first. No part is empty, unless
/// there are no samples.
ChunkOffsets chunk(std::int64_t samples, int parts);

/// Returns part `index` of each tensor, without a graph, on `device` unless it is the CPU. Results are leaves that
/// require a gradient if the tensor does and `gradients` is set. Every part contains the tensors without dimensions.
std::vector<at::Tensor> scatter(const std::vector<at::Tensor>& tensors, const ChunkOffsets& offsets, std::size_t index,
                                bool gradients, c10::Device device);

/// Concatenates the outputs of all parts along dim 0, on the device of the first part's outputs, without a graph.
/// Scalars become a vector if `stack`. [output] Throws Error if parts have different numbers of tensors. `outputs` is
/// [part][output].
std::vector<at::Tensor> gather(const std::vector<std::vector<at::Tensor>>& outputs, bool stack);

/// Returns the slice for `part` of a gradient of the gathered output `output`.
at::Tensor gradient_part(const at::Tensor& gradient, const std::vector<std::vector<at::Tensor>>& outputs,
                         std::size_t output, std::size_t part);

}  // namespace ddpkit
