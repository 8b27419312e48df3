// Tier 1: nothing of torch. Conversion of MiB options to bytes.
#pragma once

#include <cmath>
#include <cstddef>

#include <fmt/format.h>

#include <ddpkit/error.h>

namespace ddpkit {

/// Returns an option's mebibytes in bytes. Throws InvalidArgument with the option's name if the value is not positive
/// and finite.
inline std::size_t option_bytes(double mebibytes, const char* option) {
  if (!(mebibytes > 0) || !std::isfinite(mebibytes))
    throw InvalidArgument(fmt::format("{} is {} MiB, but must be positive", option, mebibytes));
  return static_cast<std::size_t>(mebibytes * (1 << 20));
}

}  // namespace ddpkit
