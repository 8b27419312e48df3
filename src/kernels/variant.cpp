#include "kernels/variant.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace ddpkit::kernels {

Variant variant() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return Variant::kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return Variant::kAvx2;
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_SVE) return Variant::kSve;
#endif
  return Variant::kBaseline;
}

const char* variant_name() {
  static constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "sve"};
  return kNames[static_cast<int>(variant())];
}

}  // namespace ddpkit::kernels
