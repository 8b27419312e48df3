// Tier 1: ATen/core/Tensor.h. Types of tensors, tensors that share memory, and copies between tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/dtype.h"

namespace ddpkit {

/// Empty for types that no kernel knows. A complex type has the dtype of its real type.
std::optional<kernels::DataType> dtype_of(c10::ScalarType type) noexcept;
/// Whether the kernels of kernels/optimizer.h know the type.
bool has_update_kernels(c10::ScalarType type) noexcept;

/// Tensors in one flat tensor start on separate cache lines.
constexpr std::size_t kAlignment = 64;

/// Elements of a run of `numel` that ends on a cache line.
inline std::int64_t aligned_numel(std::int64_t numel, std::size_t element_size) {
  const std::size_t bytes = static_cast<std::size_t>(numel) * element_size;
  return static_cast<std::int64_t>((bytes + kAlignment - 1) / kAlignment * kAlignment / element_size);
}

/// A tensor on part of `flat`'s memory, `offset` elements after its first. Not an autograd view:
/// Optimizer::zero_grad() detaches gradients in place, which a view refuses.
at::Tensor alias(const at::Tensor& flat, std::int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides);

/// Whether both tensors are dense, of one type and shape, with elements in one order. Devices may differ.
bool same_memory_layout(const at::Tensor& a, const at::Tensor& b);

/// Whether nothing else holds the gradient's memory. Autograd passes a gradient on without a copy, so that memory may
/// also be another parameter's gradient, or may still be read by an earlier node. May return false for a sole owner.
/// `added`: the tensor that autograd has just passed to the accumulator, when called from the accumulator's hook.
bool is_sole_owner(const at::Tensor& gradient, const at::Tensor& added);

/// Whether both tensors begin at one address.
inline bool same_address(const at::Tensor& a, const at::Tensor& b) { return a.const_data_ptr() == b.const_data_ptr(); }

/// Copies `from` into `to`. Autograd does not record the copy.
void copy_values(const at::Tensor& to, const at::Tensor& from);
/// The same, unless `to` is on the memory of `from`. An undefined `from` counts as zeros.
void copy_or_zero(const at::Tensor& to, const at::Tensor& from);

}  // namespace ddpkit
