// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "clstm_ppo/prices.h"

namespace clstm_ppo {

struct GenerateOptions {
  int assets = 2;
  int days = 10000;
  double swing = 0.006;  ///< The most that is expected of a day.
  double period = 24;    ///< Days of a swing, on average.
  double wander = 0.1;   ///< By which its phase strays each day, in radians: no two swings are alike.
  double noise = 0.002;  ///< Deviation of a day's return from what is expected.
  std::uint64_t seed = 0;
};

/// Prices with a pattern that can be learnt: the logarithm of each asset's price moves from day to day by
/// swing * cos(phase) + noise, and its phase by 2 pi / period + wander, all assets by themselves. Over a swing what is
/// expected adds up to nothing: who buys and waits earns what chance brings. The series say what was to be expected
/// (PriceSeries::expected_growth). Same seed, same prices. [asset]
std::vector<PriceSeries> generate_prices(const GenerateOptions& options);

/// Writes them to a new folder, a file an asset. Throws ddpkit::InvalidArgument where something is there already.
void generate(const std::filesystem::path& folder, const GenerateOptions& options);

}  // namespace clstm_ppo
