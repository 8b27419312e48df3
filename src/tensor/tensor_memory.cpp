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

void copy_values(const at::Tensor& to, const at::Tensor& from) {
  const bool plain = to.is_cpu() && from.is_cpu() && to.scalar_type() == from.scalar_type() &&
                     to.strides() == from.strides() && from.is_non_overlapping_and_dense() && !from.is_conj() &&
                     !from.is_neg();
  // For many small tensors: a tenth of the time of a call through the dispatcher.
  if (plain) {
    std::memcpy(to.data_ptr(), from.const_data_ptr(), from.nbytes());
  } else {
    const at::NoGradGuard no_grad;
    to.copy_(from);
  }
}

}  // namespace ddpkit
