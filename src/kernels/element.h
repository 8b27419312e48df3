// Tier 0: the standard library only. For GROUP_impl.cpp only. Everything is in an unnamed namespace: the linker keeps
// one copy of a shared function, and this copy could have instructions that the processor lacks.
#pragma once

#include <cstdint>

namespace ddpkit::kernels {
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
    // A comparison of numbers would prevent vectorisation.
    const std::uint32_t nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return static_cast<std::uint16_t>(nan ? 0x7fc0u : rounded);
  }
};

}  // namespace
}  // namespace ddpkit::kernels
