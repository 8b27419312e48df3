#include "kernels/variant.h"

namespace ddpkit::kernels {

Variant variant() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return Variant::kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return Variant::kAvx2;
#endif
  return Variant::kBaseline;
}

const char* variant_name() { return choose("baseline", "avx2", "avx512"); }

}  // namespace ddpkit::kernels
