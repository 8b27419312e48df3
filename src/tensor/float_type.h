// Tier 0: c10/core/ScalarType.h.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "kernels/optimizer.h"

namespace ddpkit::optim {

/// Empty for types that the kernels do not know.
inline std::optional<FloatType> float_type(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return FloatType::kFloat32;
    case c10::ScalarType::Double:
      return FloatType::kFloat64;
    case c10::ScalarType::BFloat16:
      return FloatType::kBFloat16;
    case c10::ScalarType::Half:
      return FloatType::kFloat16;
    default:
      return std::nullopt;
  }
}

}  // namespace ddpkit::optim
