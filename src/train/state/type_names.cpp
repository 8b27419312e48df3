#include "type_names.h"

#include <array>

namespace ddpkit::train {
namespace {

struct TypeNames {
  c10::ScalarType dtype;
  std::string_view name, storage;
};

// torch/storage.py, _dtype_to_storage_type_map() and _new_dtypes().
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

}  // namespace ddpkit::train
