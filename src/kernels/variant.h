// Tier 0: the standard library only.
//
// GROUP_impl.cpp is compiled once per variant. A new group of kernels needs:
// - GROUP.h, which declares `template <Variant> bool kernel(Arguments&)`;
// - GROUP_impl.cpp, which specializes the template for Variant::DDPKIT_VARIANT;
// - GROUP.cpp, which selects the variant;
// - a line in src/CMakeLists.txt.
// Kernels return false for unsupported types.
#pragma once

#include <stdexcept>

namespace ddpkit::kernels {

/// Instruction sets. Each set of an architecture includes the previous sets. The baseline of 64-bit Arm has NEON.
enum class Variant { kBaseline, kAvx2, kAvx512, kSve };

/// Returns the best variant for this processor.
Variant variant();
/// Returns "baseline", "avx2", "avx512" or "sve".
const char* variant_name();

}  // namespace ddpkit::kernels

#if defined(__x86_64__)
#define DDPKIT_CHOOSE_VARIANT(kernel)                        \
  (variant() == Variant::kAvx512 ? &kernel<Variant::kAvx512> \
   : variant() == Variant::kAvx2 ? &kernel<Variant::kAvx2>   \
                                 : &kernel<Variant::kBaseline>)
#elif defined(__aarch64__)
#define DDPKIT_CHOOSE_VARIANT(kernel) \
  (variant() == Variant::kSve ? &kernel<Variant::kSve> : &kernel<Variant::kBaseline>)
#else
#define DDPKIT_CHOOSE_VARIANT(kernel) (&kernel<Variant::kBaseline>)
#endif
/// Defines `kernel(arguments)`, which calls the variant for this processor.
#define DDPKIT_DEFINE_KERNEL(kernel, Arguments)                                                  \
  void kernel(Arguments& arguments) {                                                            \
    static const auto function = DDPKIT_CHOOSE_VARIANT(kernel);                                  \
    if (!function(arguments)) throw std::logic_error(#kernel ": no kernel for these arguments"); \
  }
