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
  double swing = 0.006;  ///< Largest expected return per day.
  double period = 24;    ///< Mean length of a cycle, in days.
  double wander = 0.1;   ///< Standard deviation of the phase's daily change, in radians.
  double noise = 0.002;  ///< Standard deviation of a day's return around its expectation.
  std::uint64_t seed = 0;
};

/// Generates prices with a learnable pattern. The logarithm of each asset's price changes per day by swing * cos(phase)
/// + noise, its phase by 2 pi / period + wander. The assets are independent. Expected returns over a cycle sum to 0, so
/// buy-and-hold earns only chance. The series contain the expectations (PriceSeries::expected_growth). The same seed
/// gives the same prices. [asset]
std::vector<PriceSeries> generate_prices(const GenerateOptions& options);

/// Writes the prices to a new folder, one file per asset. Throws ddpkit::InvalidArgument if the folder is not empty.
void generate(const std::filesystem::path& folder, const GenerateOptions& options);

}  // namespace clstm_ppo
