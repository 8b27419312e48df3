// Tier 1. What DDPKIT_DEBUG asks for.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include <ddpkit/comm/process_group.h>

namespace ddpkit {

enum class DebugLevel { kOff, kInfo, kDetail };

/// From DDPKIT_DEBUG: off (or empty), info, detail. Read once. Throws InvalidArgument for anything else.
DebugLevel debug_level();

/// One line on stderr that begins with the rank.
void debug_line(const ProcessGroup& group, const std::string& text);

/// Says so when a gradient holds NaN or infinity, with the parameter's name.
void warn_unless_finite(const std::string& name, const at::Tensor& gradient, const ProcessGroup& group,
                        std::uint64_t step);

}  // namespace ddpkit
