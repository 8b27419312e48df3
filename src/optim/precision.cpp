#include <ddpkit/optim/precision.h>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/cpu/Utils.h>
#include <c10/core/DeviceGuard.h>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "tensor/autocast_cache.h"

namespace ddpkit::optim {
namespace {

thread_local bool keeps_casts = true;

/// Returns whether a GPU is Ampere or later (compute capability 8.0), which added bfloat16 and TensorFloat-32. CPU
/// libraries without CUDA can ask LibTorch only for one feature that needs Ampere.
bool is_ampere(c10::Device device) {
  if (!device.is_cuda() || !at::hasCUDA()) return false;
  const c10::DeviceGuard guard(device);
  return at::detail::getCUDAHooks().supportsBFloat16ConvolutionWithCuDNNv8();
}

c10::Device checked(c10::Device device, c10::ScalarType dtype) {
  if (!device.is_cpu() && !device.is_cuda())
    throw InvalidArgument(fmt::format("Autocast supports CPUs and CUDA devices, not {}", device.str()));
  if (dtype != c10::ScalarType::BFloat16 && dtype != c10::ScalarType::Half)
    throw InvalidArgument(fmt::format("Autocast computes in bfloat16 or float16, not in {}", c10::toString(dtype)));
  if (device.is_cuda() && dtype == c10::ScalarType::BFloat16 && !is_ampere(device))
    throw InvalidArgument(fmt::format(
        "{} has no bfloat16 (it needs compute capability 8.0): use float16 and a GradScaler", device.str()));
  return device;
}

}  // namespace

void disable_autocast_cache() { keeps_casts = false; }

Autocast::Autocast(c10::Device device, c10::ScalarType dtype, const AutocastOptions& options)
    : device_(checked(device, dtype).type()),
      dtype_before_(at::autocast::get_autocast_dtype(device_)),
      enabled_before_(at::autocast::is_autocast_enabled(device_)),
      cache_before_(at::autocast::is_autocast_cache_enabled()) {
  at::autocast::set_autocast_enabled(device_, options.enabled);
  at::autocast::set_autocast_dtype(device_, dtype);
  at::autocast::set_autocast_cache_enabled(options.cache && keeps_casts);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0 && keeps_casts) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, enabled_before_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
  at::autocast::set_autocast_cache_enabled(cache_before_);
}

c10::ScalarType fastest_type(c10::Device device) {
  // A process must request the AMX units once.
  if (device.is_cpu()) return at::cpu::init_amx() ? c10::ScalarType::BFloat16 : c10::ScalarType::Float;
  return is_ampere(device) ? c10::ScalarType::BFloat16 : c10::ScalarType::Half;
}

void set_precision(const Precision& precision, c10::Device device) {
  const bool tf32 = precision.matmul_tf32.value_or(false) || precision.cudnn_tf32.value_or(false);
  if (tf32 && !is_ampere(device))
    throw InvalidArgument(
        fmt::format("{} has no TensorFloat-32: it needs a GPU of compute capability 8.0", device.str()));
  if (precision.cudnn_benchmark.value_or(false) && !(device.is_cuda() && at::hasCUDA()))
    throw InvalidArgument(fmt::format("{} does not run cuDNN: its benchmark needs a GPU", device.str()));
  at::Context& context = at::globalContext();
  if (precision.matmul_tf32) context.setAllowTF32CuBLAS(*precision.matmul_tf32);
  if (precision.cudnn_tf32) context.setAllowTF32CuDNN(*precision.cudnn_tf32);
  if (precision.cudnn_benchmark) context.setBenchmarkCuDNN(*precision.cudnn_benchmark);
}

Precision precision() {
  const at::Context& context = at::globalContext();
  return {.matmul_tf32 = context.allowTF32CuBLAS(),
          .cudnn_tf32 = context.allowTF32CuDNN(),
          .cudnn_benchmark = context.benchmarkCuDNN()};
}

}  // namespace ddpkit::optim
