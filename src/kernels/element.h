// Tier 0: the standard library only. For kernels_<variant>.cpp alone: everything lies in an unnamed namespace, since a
// function that the linker shares between translation units could carry one variant's instructions to a processor that
// lacks them.
#pragma once

#include <cstdint>

namespace ddpkit::simd {
namespace {

/// How an element is stored, and as what it is accumulated.
template <class T>
struct Element {
  using Storage = T;
  using Accumulator = T;
  static T load(T value) { return value; }
  static T store(T value) { return value; }
};

template <>
struct Element<_Float16> {
  using Storage = _Float16;
  using Accumulator = float;
  static float load(_Float16 value) { return static_cast<float>(value); }
  static _Float16 store(float value) { return static_cast<_Float16>(value); }
};

struct BFloat16;

template <>
struct Element<BFloat16> {
  using Storage = std::uint16_t;
  using Accumulator = float;
  static float load(std::uint16_t value) { return __builtin_bit_cast(float, static_cast<std::uint32_t>(value) << 16); }
  static std::uint16_t store(float value) {
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
    // Whether it is a NaN is asked of the bits, not of the number: a comparison would keep the loop from being
    // vectorised.
    const std::uint32_t nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return static_cast<std::uint16_t>(nan ? 0x7fc0u : rounded);
  }
};

}  // namespace
}  // namespace ddpkit::simd
