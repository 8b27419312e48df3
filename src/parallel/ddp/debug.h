// Tier 1. Logging for DDPKIT_DEBUG.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include <ddpkit/comm/process_group.h>

namespace ddpkit {

enum class DebugLevel { kOff, kInfo, kDetail };

/// Returns the level in DDPKIT_DEBUG: off (or empty), info, detail. Reads the variable once. Throws InvalidArgument for
/// other values.
DebugLevel debug_level();

/// Prints one line to stderr, prefixed with the rank.
void debug_line(const ProcessGroup& group, const std::string& text);

/// Logs a warning with the parameter's name if a gradient holds NaN or infinity.
void warn_unless_finite(const std::string& name, const at::Tensor& gradient, const ProcessGroup& group,
                        std::uint64_t step);

}  // namespace ddpkit
