// Tier 0: c10/core headers only.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace ddpkit::optim {

/// Options of Autocast.
struct AutocastOptions {
  bool enabled = true;  ///< False: operations keep their types within the scope, whatever surrounds it.
  /// Casts of weights are kept until the outermost scope ends. Never on DataParallel's threads: LibTorch keeps those of
  /// all threads in one place, and who is done first would take them from the others.
  bool cache = true;
};

/// Mixed precision within a scope, as Python's torch.autocast: matrix products and convolutions run in `dtype`, what
/// needs the range in float32. Wrap forward and loss, not backward. For float16 use a GradScaler.
///
///     {
///       const ddpkit::optim::Autocast autocast(group.device(), torch::kBFloat16);
///       loss = torch::cross_entropy_loss(ddp(batch.data), batch.target);
///     }
///     loss.backward();
///
/// Scopes nest; the end of one brings back what was before it, and the end of the outermost clears the cache of casts,
/// without which the next step would use the last one's weights. Holds for this thread and for backward of what was
/// recorded in it. Create and destroy on one thread, in the order of scopes.
class Autocast {
 public:
  /// Throws InvalidArgument for a device other than CPU and CUDA, a type other than bfloat16 and float16, and bfloat16
  /// on a GPU that lacks it (compute capability below 8.0).
  Autocast(c10::Device device, c10::ScalarType dtype, const AutocastOptions& options = {});
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  c10::DeviceType device_;
  c10::ScalarType dtype_before_;
  bool enabled_before_;
  bool cache_before_;
};

/// The type in which mixed precision gains most on `device`: bfloat16 where it is fast (CPUs with AMX, GPUs from
/// compute capability 8.0), float16 on other GPUs, and float32, which means none, where it would only lose: the other
/// CPUs.
c10::ScalarType fastest_type(c10::Device device);

/// What the process computes float32 with on GPUs; an empty field stays as it is. Python's names are
/// torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 and torch.backends.cudnn.benchmark.
struct Precision {
  std::optional<bool> matmul_tf32 = std::nullopt;      ///< Matrix products in TensorFloat-32: 10 bits of mantissa.
  std::optional<bool> cudnn_tf32 = std::nullopt;       ///< Convolutions and RNNs.
  std::optional<bool> cudnn_benchmark = std::nullopt;  ///< Tries algorithms for each new shape; not deterministic.
};

/// Sets it for the whole process, between steps. Throws InvalidArgument, and changes nothing, for TensorFloat-32 on a
/// device that lacks it (no GPU, or a compute capability below 8.0) and for the benchmark without a GPU; switching off
/// is allowed everywhere.
void set_precision(const Precision& precision, c10::Device device);
/// As it is set now; all fields have values.
Precision precision();

}  // namespace ddpkit::optim
