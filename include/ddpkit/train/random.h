// Tier 0: the standard library only.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <random>
#include <utility>
#include <vector>

namespace ddpkit::train {

/// Random numbers that are the same on every machine. The distributions of the standard library differ between
/// implementations; its engines do not.
class Random {
 public:
  /// The same seed gives the same numbers.
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  /// Returns 64 random bits.
  std::uint64_t bits() { return engine_(); }
  /// Returns a number in [low, high).
  double uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(engine_() >> 11) * 0x1p-53;
  }
  /// Returns a normally distributed number with mean 0 (Box-Muller).
  double normal(double deviation) {
    const double radius = std::sqrt(-2 * std::log(1 - uniform(0, 1)));
    return deviation * radius * std::cos(uniform(0, 2 * std::numbers::pi));
  }
  /// Returns a number in [0, 2 pi).
  double angle() { return uniform(0, 2 * std::numbers::pi); }
  /// Returns an integer in 0 .. count - 1, with a bias below count / 2^64.
  std::int64_t below(std::int64_t count) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(count));
  }

  /// Fisher-Yates shuffle.
  template <class T>
  void shuffle(std::vector<T>& values) {
    for (std::size_t left = values.size(); left > 1; --left)
      std::swap(values[left - 1], values[static_cast<std::size_t>(below(static_cast<std::int64_t>(left)))]);
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace ddpkit::train
