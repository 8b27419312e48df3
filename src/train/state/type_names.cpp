#include "train/state/type_names.h"

#include <array>
#include <utility>

namespace ddpkit::train {
namespace {

struct TypeNames {
  c10::ScalarType dtype;
  std::string_view name, storage;
};

// From torch/storage.py, _dtype_to_storage_type_map() and _new_dtypes().
constexpr std::array kTypes{
    TypeNames{c10::ScalarType::Float, "float32", "FloatStorage"},
    TypeNames{c10::ScalarType::Double, "float64", "DoubleStorage"},
    TypeNames{c10::ScalarType::Half, "float16", "HalfStorage"},
    TypeNames{c10::ScalarType::BFloat16, "bfloat16", "BFloat16Storage"},
    TypeNames{c10::ScalarType::Long, "int64", "LongStorage"},
    TypeNames{c10::ScalarType::Int, "int32", "IntStorage"},
    TypeNames{c10::ScalarType::Short, "int16", "ShortStorage"},
    TypeNames{c10::ScalarType::Char, "int8", "CharStorage"},
    TypeNames{c10::ScalarType::Byte, "uint8", "ByteStorage"},
    TypeNames{c10::ScalarType::Bool, "bool", "BoolStorage"},
    TypeNames{c10::ScalarType::ComplexFloat, "complex64", "ComplexFloatStorage"},
    TypeNames{c10::ScalarType::ComplexDouble, "complex128", "ComplexDoubleStorage"},
    TypeNames{c10::ScalarType::ComplexHalf, "complex32", ""},
    TypeNames{c10::ScalarType::UInt16, "uint16", ""},
    TypeNames{c10::ScalarType::UInt32, "uint32", ""},
    TypeNames{c10::ScalarType::UInt64, "uint64", ""},
    TypeNames{c10::ScalarType::Float8_e5m2, "float8_e5m2", ""},
    TypeNames{c10::ScalarType::Float8_e4m3fn, "float8_e4m3fn", ""},
    TypeNames{c10::ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz", ""},
    TypeNames{c10::ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz", ""},
    TypeNames{c10::ScalarType::Float8_e8m0fnu, "float8_e8m0fnu", ""},
    TypeNames{c10::ScalarType::Float4_e2m1fn_x2, "float4_e2m1fn_x2", ""},
    TypeNames{c10::ScalarType::Bits8, "bits8", ""},
    TypeNames{c10::ScalarType::Bits16, "bits16", ""},
    TypeNames{c10::ScalarType::Bits1x8, "bits1x8", ""},
    TypeNames{c10::ScalarType::Bits2x4, "bits2x4", ""},
    TypeNames{c10::ScalarType::Bits4x2, "bits4x2", ""},
    // torch.save writes these types as values, but no tensors of these types.
    TypeNames{c10::ScalarType::QInt8, "qint8", ""},
    TypeNames{c10::ScalarType::QUInt8, "quint8", ""},
    TypeNames{c10::ScalarType::QInt32, "qint32", ""},
    TypeNames{c10::ScalarType::QUInt4x2, "quint4x2", ""},
    TypeNames{c10::ScalarType::QUInt2x4, "quint2x4", ""},
    TypeNames{c10::ScalarType::UInt1, "uint1", ""},
    TypeNames{c10::ScalarType::UInt2, "uint2", ""},
    TypeNames{c10::ScalarType::UInt3, "uint3", ""},
    TypeNames{c10::ScalarType::UInt4, "uint4", ""},
    TypeNames{c10::ScalarType::UInt5, "uint5", ""},
    TypeNames{c10::ScalarType::UInt6, "uint6", ""},
    TypeNames{c10::ScalarType::UInt7, "uint7", ""},
    TypeNames{c10::ScalarType::Int1, "int1", ""},
    TypeNames{c10::ScalarType::Int2, "int2", ""},
    TypeNames{c10::ScalarType::Int3, "int3", ""},
    TypeNames{c10::ScalarType::Int4, "int4", ""},
    TypeNames{c10::ScalarType::Int5, "int5", ""},
    TypeNames{c10::ScalarType::Int6, "int6", ""},
    TypeNames{c10::ScalarType::Int7, "int7", ""},
};

constexpr std::array kLayouts{
    std::pair{c10::kStrided, std::string_view("torch.strided")},
    std::pair{c10::kSparse, std::string_view("torch.sparse_coo")},
    std::pair{c10::kSparseCsr, std::string_view("torch.sparse_csr")},
    std::pair{c10::kSparseCsc, std::string_view("torch.sparse_csc")},
    std::pair{c10::kSparseBsr, std::string_view("torch.sparse_bsr")},
    std::pair{c10::kSparseBsc, std::string_view("torch.sparse_bsc")},
};

}  // namespace

std::string_view storage_name_of(c10::ScalarType dtype) {
  for (const TypeNames& type : kTypes) {
    if (type.dtype == dtype) return type.storage;
  }
  return {};
}

std::optional<c10::ScalarType> dtype_of_storage(std::string_view name) {
  for (const TypeNames& type : kTypes) {
    if (!type.storage.empty() && type.storage == name) return type.dtype;
  }
  return std::nullopt;
}

std::string_view name_of(c10::ScalarType dtype) {
  for (const TypeNames& type : kTypes) {
    if (type.dtype == dtype) return type.name;
  }
  return {};
}

std::optional<c10::ScalarType> dtype_of_name(std::string_view name) {
  for (const TypeNames& type : kTypes) {
    if (type.name == name) return type.dtype;
  }
  return std::nullopt;
}

std::string_view layout_name(c10::Layout layout) {
  for (const auto& [known, name] : kLayouts) {
    if (known == layout) return name;
  }
  return {};
}

std::optional<c10::Layout> layout_of_name(std::string_view name) {
  for (const auto& [layout, known] : kLayouts) {
    if (known == name) return layout;
  }
  return std::nullopt;
}

}  // namespace ddpkit::train
