// Tier 0: the standard library only.
//
// Vector kernels are compiled once for each instruction set, from one source, and chosen at run time. To add a group:
// write GROUP_impl.h, include it in GROUP_baseline.cpp, GROUP_avx2.cpp and GROUP_avx512.cpp, which define
// function_baseline, function_avx2 and function_avx512, and name GROUP in src/CMakeLists.txt.
#pragma once

namespace ddpkit::simd {

/// Instruction sets, each with all of those before it.
enum class Variant { kBaseline, kAvx2, kAvx512 };

/// The best that this processor has.
Variant variant();
/// "baseline", "avx2" or "avx512".
const char* variant_name();

template <class Function>
Function choose(Function baseline, Function avx2, Function avx512) {
  switch (variant()) {
    case Variant::kAvx512:
      return avx512;
    case Variant::kAvx2:
      return avx2;
    default:
      return baseline;
  }
}

}  // namespace ddpkit::simd

/// The one of function_baseline, function_avx2 and function_avx512 that suits this processor.
#if defined(__x86_64__)
#define DDPKIT_CHOOSE_VARIANT(function) \
  ::ddpkit::simd::choose(&function##_baseline, &function##_avx2, &function##_avx512)
#else
#define DDPKIT_CHOOSE_VARIANT(function) (&function##_baseline)
#endif
