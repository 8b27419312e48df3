// Tier 1: ATen/core/Tensor.h. Types of tensors, tensors that share memory, and copies between tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "kernels/dtype.h"

namespace ddpkit {

/// Returns nothing for types without kernels. A complex type has the dtype of its real type.
std::optional<kernels::DataType> dtype_of(c10::ScalarType type) noexcept;
/// Returns whether kernels/optimizer.h has kernels for the type.
bool has_update_kernels(c10::ScalarType type) noexcept;

/// Returns a tensor on part of `flat`'s memory, `offset` elements after the beginning. Not an autograd view:
/// Optimizer::zero_grad() detaches gradients in place, which fails for views.
at::Tensor alias(const at::Tensor& flat, std::int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides);

/// Returns a dense tensor's elements in memory order.
at::Tensor in_order(const at::Tensor& tensor);

/// Returns whether both tensors are dense, with the same type, shape and order of elements. Devices may differ.
bool same_memory_layout(const at::Tensor& a, const at::Tensor& b);

/// Returns whether no other tensor holds the gradient's memory. Autograd passes gradients without a copy: the memory
/// may also be another parameter's gradient, or an earlier node may still read it. May return false for a sole owner.
/// `added`: the tensor that autograd passed to the accumulator, if called from the accumulator's hook.
bool is_sole_owner(const at::Tensor& gradient, const at::Tensor& added);

/// Returns whether both tensors begin at the same address.
inline bool same_address(const at::Tensor& a, const at::Tensor& b) { return a.const_data_ptr() == b.const_data_ptr(); }

/// Copies `from` to `to`. Autograd does not record the copy.
void copy_values(const at::Tensor& to, const at::Tensor& from);
/// Copies `from` to `to`, unless both have the same memory. An undefined `from` counts as zeros.
void copy_or_zero(const at::Tensor& to, const at::Tensor& from);

/// Calls `transfer` with the bytes of a tensor's elements, dense. `receives`: `transfer` writes to them.
void transfer_bytes(const at::Tensor& tensor, bool receives, const std::function<void(const at::Tensor&)>& transfer);

/// Copies between tensors. On a device, flush() makes all copies with a few kernels.
class CopyList {
 public:
  void add(const at::Tensor& to, const at::Tensor& from);
  void flush();
  void clear() noexcept { *this = {}; }

 private:
  std::vector<at::Tensor> to_, from_;
};

}  // namespace ddpkit
