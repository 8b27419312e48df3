// Tier 0: c10/core headers only.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace ddpkit::optim {

/// Options of Autocast.
struct AutocastOptions {
  bool enabled = true;  ///< False: operations in the scope keep their types, also within another Autocast.
  /// Keep the casts of weights until the outermost scope ends. Never used on DataParallel's threads: LibTorch's cache
  /// is shared by all threads, and the first thread to finish would clear it for the others.
  bool cache = true;
};

/// Enables mixed precision within a scope, like Python's torch.autocast. Matrix products and convolutions run in
/// `dtype`. Operations that need the range run in float32. Wrap forward and loss, not backward. For float16, use a
/// GradScaler.
///
///     {
///       const ddpkit::optim::Autocast autocast(group.device(), torch::kBFloat16);
///       loss = torch::cross_entropy_loss(ddp(batch.data), batch.target);
///     }
///     loss.backward();
///
/// Scopes nest. The end of a scope restores the previous settings. The end of the outermost scope clears the cache of
/// casts; otherwise the next step would use outdated weights. Applies to this thread, and to the backward of operations
/// recorded in the scope. Construct and destroy on the same thread, in scope order.
class Autocast {
 public:
  /// Throws InvalidArgument for a device other than CPU and CUDA, for a type other than bfloat16 and float16, and for
  /// bfloat16 on a GPU without support (compute capability below 8.0).
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

/// Returns the fastest type for mixed precision on `device`: bfloat16 on CPUs with AMX and on GPUs from compute
/// capability 8.0, float16 on other GPUs. Returns float32 (no mixed precision) on other CPUs, where it would be slower.
c10::ScalarType fastest_type(c10::Device device);

/// float32 settings for GPUs. Empty fields keep their setting. In Python:
/// torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 and torch.backends.cudnn.benchmark.
struct Precision {
  std::optional<bool> matmul_tf32 = std::nullopt;      ///< TensorFloat-32 in matrix products: 10 bits of mantissa.
  std::optional<bool> cudnn_tf32 = std::nullopt;       ///< TensorFloat-32 in convolutions and RNNs.
  std::optional<bool> cudnn_benchmark = std::nullopt;  ///< Benchmark algorithms for each new shape; not deterministic.
};

/// Applies the settings to the whole process. Call it between steps. Throws InvalidArgument, and changes nothing, for
/// TensorFloat-32 on a device without support (no GPU, or compute capability below 8.0), and for the benchmark without
/// a GPU. Disabling is always allowed.
void set_precision(const Precision& precision, c10::Device device);
/// Returns the current settings; all fields have values.
Precision precision();

}  // namespace ddpkit::optim
