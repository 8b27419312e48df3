#include "parallel/ddp/debug.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <cstdlib>
#include <string_view>

#include <ddpkit/error.h>

#include "comm/cuda.h"

namespace ddpkit {

DebugLevel debug_level() {
  static const DebugLevel level = [] {
    const char* value = std::getenv("DDPKIT_DEBUG");
    const std::string_view text = value ? value : "";
    if (text.empty() || text == "off") return DebugLevel::kOff;
    if (text == "info") return DebugLevel::kInfo;
    if (text == "detail") return DebugLevel::kDetail;
    throw InvalidArgument(fmt::format("DDPKIT_DEBUG is \"{}\", but must be off, info or detail", text));
  }();
  return level;
}

void debug_line(const ProcessGroup& group, const std::string& text) {
  const std::string line = fmt::format("[ddpkit rank {}] {}\n", group.rank(), text);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

void warn_unless_finite(const std::string& name, const at::Tensor& gradient, const ProcessGroup& group,
                        std::uint64_t step) {
  const at::NoGradGuard no_grad;
  if (!gradient.defined()) return;
  if (gradient.is_cuda() && !cuda::graphs_in_capture().empty())
    throw InvalidArgument(
        "DDPKIT_DEBUG=detail reads each gradient on the host, which a CUDA graph cannot capture: "
        "set it to info or off");
  const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
  if (at::isfinite(values).all().item<bool>()) return;
  debug_line(group, fmt::format("the gradient of {} is not finite in backward number {} on this rank, before it is "
                                "averaged over the ranks",
                                name, step));
}

}  // namespace ddpkit
