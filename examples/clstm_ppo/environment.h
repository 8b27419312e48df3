// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "clstm_ppo/market.h"

namespace clstm_ppo {

struct EnvironmentOptions {
  double initial_cash = 1e6;
  /// The most shares of an asset that a step trades, which action 1 means. Empty: as many as the whole portfolio's
  /// value buys at the day's close, so that one step may turn all of it over however large it has grown.
  std::optional<double> hmax = std::nullopt;
  double cost = 0.001;  ///< Of what is traded, each way.
  /// On days above it everything is sold and nothing bought.
  double turbulence_threshold = std::numeric_limits<double>::infinity();
};

/// A portfolio in a market, after J. Zou and others, arXiv 2212.02721, section 3: the state is the balance, the
/// holdings and each asset's close, MACD, RSI, CCI and ADX; the action, of each asset, the share of `hmax` to buy or to
/// sell; the reward the change of the portfolio's value, costs included. Other than there, shares may be fractional, as
/// brokers of currencies have them, and all of the state is relative (market.h).
class TradingEnvironment {
 public:
  TradingEnvironment(const Market& market, const EnvironmentOptions& options);

  /// Numbers of a day's state: balance and holdings as shares of the portfolio's value, then each signal of each asset.
  static std::size_t state_size(std::size_t assets) { return 1 + (1 + kSignals) * assets; }

  /// Begins with cash alone on day `day`.
  void reset(std::size_t day);

  /// Trades at the day's close and goes on to the next day's, which the market must have. Actions outside -1 to 1 count
  /// as these. What is sold pays for what is bought on the same day; where the money is too short, all purchases shrink
  /// by the same factor. Returns the reward: the change of the portfolio's value as a share of what it was. [asset]
  double step(std::span<const float> actions);

  /// Writes the day's state: [state_size()].
  void state(std::span<float> out) const;
  /// What state() would be on `day` for a portfolio of cash alone: the window before an episode's first day.
  static void cash_state(const Market& market, std::size_t day, std::span<float> out);

  std::size_t day() const noexcept { return day_; }
  double cash() const noexcept { return cash_; }
  double holding(std::size_t asset) const { return holdings_[asset]; }  ///< Shares.
  double value() const;                                                 ///< Of cash and holdings at the day's close.
  double costs() const noexcept { return costs_; }                      ///< Paid since reset().

 private:
  void sell(std::size_t asset, double shares);

  const Market* market_;
  EnvironmentOptions options_;
  std::size_t day_ = 0;
  double cash_ = 0;
  double costs_ = 0;
  std::vector<double> holdings_;   // [asset]
  std::vector<double> purchases_;  // [asset]
};

}  // namespace clstm_ppo
