// Tier 0: the standard library only. Only for GROUP_impl.cpp. Everything is in an unnamed namespace: of a function with
// external linkage, the linker would keep one copy, which could have instructions that the processor lacks.
#pragma once

#include <cstdint>

namespace ddpkit::kernels {
namespace {

#if defined(__aarch64__)
using Half = __fp16;  // g++ 12 has _Float16 on x86-64 only.
#else
using Half = _Float16;
#endif

/// The storage type and the accumulator type of an element.
template <class T>
struct Element {
  using Storage = T;
  using Accumulator = T;
  static T load(T value) { return value; }
  static T store(T value) { return value; }
};

template <>
struct Element<Half> {
  using Storage = Half;
  using Accumulator = float;
  static float load(Half value) { return static_cast<float>(value); }
  static Half store(float value) { return static_cast<Half>(value); }
};

struct BFloat16;

template <>
struct Element<BFloat16> {
  using Storage = std::uint16_t;
  using Accumulator = float;
  static float load(std::uint16_t value) { return __builtin_bit_cast(float, static_cast<std::uint32_t>(value) << 16); }
  static std::uint16_t store(float value) {
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // Rounds to nearest, ties to even.
    // A floating-point comparison would prevent vectorization.
    const std::uint32_t nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return static_cast<std::uint16_t>(nan ? 0x7fc0u : rounded);
  }
};

}  // namespace
}  // namespace ddpkit::kernels
