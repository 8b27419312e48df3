// Seeds of tests with random cases.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

namespace ddpkit::testing {

/// DDPKIT_TEST_SEED, or a new seed in each run. Printed, so that a failure can be repeated.
inline std::uint64_t seed_of_this_run() {
  const char* text = std::getenv("DDPKIT_TEST_SEED");
  const std::uint64_t seed = text ? std::strtoull(text, nullptr, 10) : std::random_device()();
  std::cout << "DDPKIT_TEST_SEED=" << seed << std::endl;
  return seed;
}

}  // namespace ddpkit::testing
