// Random numbers for tests that draw their cases.
#pragma once

#include <cstdlib>
#include <iostream>
#include <random>
#include <string>

namespace ddpkit::testing {

/// The seed of this run, printed. DDPKIT_TEST_SEED repeats a run; without the variable each run draws other cases.
inline std::mt19937 drawn_random() {
  const char* given = std::getenv("DDPKIT_TEST_SEED");
  const auto seed = given ? static_cast<unsigned>(std::stoul(given)) : std::random_device()();
  std::cout << "DDPKIT_TEST_SEED=" << seed << std::endl;
  return std::mt19937(seed);
}

}  // namespace ddpkit::testing
