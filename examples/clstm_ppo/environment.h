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
  /// The most shares of an asset that a step trades (action 1). Empty: the number that the portfolio's value buys at
  /// the day's close, so that one step can turn over the portfolio at any size.
  std::optional<double> hmax = std::nullopt;
  double cost = 0.001;  ///< Share of the traded value, for purchases and for sales.
  /// On days above this value, everything is sold and nothing is bought.
  double turbulence_threshold = std::numeric_limits<double>::infinity();
};

/// A portfolio in a market, after J. Zou and others, arXiv 2212.02721, section 3:
/// - State: the balance, the holdings and each asset's close, MACD, RSI, CCI and ADX.
/// - Action: for each asset, the share of `hmax` to buy or to sell.
/// - Reward: the change of the portfolio's value, including costs.
/// Two differences: shares may be fractional, as at currency brokers, and the state is relative (market.h).
class TradingEnvironment {
 public:
  TradingEnvironment(const Market& market, const EnvironmentOptions& options);

  /// Size of a day's state: balance and holdings as shares of the portfolio's value, then each signal of each asset.
  static std::size_t state_size(std::size_t assets) { return 1 + (1 + kSignals) * assets; }

  /// Restarts on `day` with cash only.
  void reset(std::size_t day);

  /// Trades at the day's close and advances to the next day, which the market must have. Clamps actions to -1 .. 1.
  /// Sales pay for purchases of the same day. If the money does not suffice, all purchases shrink by the same factor.
  /// Returns the reward: the relative change of the portfolio's value. [asset]
  double step(std::span<const float> actions);

  /// Writes the day's state: [state_size()].
  void state(std::span<float> out) const;
  /// Writes the state of a cash-only portfolio on `day`, for the window before an episode's first day.
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
