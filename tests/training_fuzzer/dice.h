// Random choices that are the same on every machine.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>

namespace ddpkit::fuzz {

/// The standard library's distributions differ between implementations.
class Dice {
 public:
  Dice(std::uint64_t seed, std::uint64_t number) {
    std::seed_seq sequence{seed & 0xffffffffu, seed >> 32, number & 0xffffffffu, number >> 32};
    engine_.seed(sequence);
  }
  /// From 0 to count - 1.
  int below(int count) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(count)); }
  bool percent(int chance) { return below(100) < chance; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return *(values.begin() + below(static_cast<int>(values.size())));
  }
  std::string word(std::initializer_list<const char*> values) { return one_of<const char*>(values); }

 private:
  std::mt19937_64 engine_;
};

}  // namespace ddpkit::fuzz
