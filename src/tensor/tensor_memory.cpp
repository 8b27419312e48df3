#include "tensor/tensor_memory.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstring>

namespace ddpkit {

using kernels::DataType;

std::optional<DataType> dtype_of(c10::ScalarType type) noexcept {
  switch (type) {
    case c10::ScalarType::Byte:
      return DataType::kUInt8;
    case c10::ScalarType::Char:
      return DataType::kInt8;
    case c10::ScalarType::Short:
      return DataType::kInt16;
    case c10::ScalarType::Int:
      return DataType::kInt32;
    case c10::ScalarType::Long:
      return DataType::kInt64;
    case c10::ScalarType::Half:
      return DataType::kFloat16;
    case c10::ScalarType::BFloat16:
      return DataType::kBFloat16;
    case c10::ScalarType::Float:
    case c10::ScalarType::ComplexFloat:
      return DataType::kFloat32;
    case c10::ScalarType::Double:
    case c10::ScalarType::ComplexDouble:
      return DataType::kFloat64;
    case c10::ScalarType::Bool:
      return DataType::kBool;
    default:
      return std::nullopt;
  }
}

bool has_update_kernels(c10::ScalarType type) noexcept { return c10::isFloatingType(type) && dtype_of(type); }

at::Tensor alias(const at::Tensor& flat, std::int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const at::NoGradGuard no_grad;
  return at::empty({0}, flat.options()).set_(flat.storage(), flat.storage_offset() + offset, sizes, strides);
}

at::Tensor in_order(const at::Tensor& tensor) { return tensor.detach().as_strided({tensor.numel()}, {1}); }

bool same_memory_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == at::kStrided && b.layout() == at::kStrided && a.scalar_type() == b.scalar_type() &&
         a.sizes() == b.sizes() && a.strides() == b.strides() && a.is_non_overlapping_and_dense() && !a.is_conj() &&
         !a.is_neg() && !b.is_conj() && !b.is_neg();
}

bool is_sole_owner(const at::Tensor& gradient, const at::Tensor& added) {
  std::size_t known = 1;
  if (added.defined() && added.has_storage() && added.is_alias_of(gradient)) {
    ++known;  // Autograd stored the tensor as the gradient. Backward releases its reference after this hook.
    // A view holds a reference to its base, usually the product that was transposed.
    if (added.is_view() && added._base().use_count() == 1) ++known;
  }
  return gradient.storage().use_count() == known;
}

void copy_values(const at::Tensor& to, const at::Tensor& from) {
  // For many small tensors, this takes a tenth of the time of a call through the dispatcher.
  if (to.is_cpu() && from.is_cpu() && same_memory_layout(to, from)) {
    std::memcpy(to.data_ptr(), from.const_data_ptr(), from.nbytes());
  } else {
    const at::NoGradGuard no_grad;
    to.copy_(from);
  }
}

void copy_or_zero(const at::Tensor& to, const at::Tensor& from) {
  if (!from.defined()) {
    const at::NoGradGuard no_grad;
    to.zero_();
  } else if (!same_address(to, from)) {
    copy_values(to, from);
  }
}

void transfer_bytes(const at::Tensor& tensor, bool receives, const std::function<void(const at::Tensor&)>& transfer) {
  if (tensor.numel() == 0) return;
  const at::NoGradGuard no_grad;
  const at::Tensor dense = tensor.detach().contiguous();
  transfer(dense.view({-1}).view(at::kByte));
  if (!receives) return;
  if (tensor.is_contiguous()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  } else {
    tensor.copy_(dense);
  }
}

void CopyList::add(const at::Tensor& to, const at::Tensor& from) {
  if (to.is_cpu()) return copy_values(to, from);
  to_.push_back(to);
  from_.push_back(from);
}

void CopyList::flush() {
  const at::NoGradGuard no_grad;
  if (!to_.empty()) at::_foreach_copy_(to_, from_);
  clear();
}

}  // namespace ddpkit
