#include "clstm_ppo/environment.h"

#include <algorithm>

namespace clstm_ppo {
namespace {

void write_signals(const Market& market, std::size_t day, std::span<float> out) {
  const std::size_t assets = market.assets();
  for (std::size_t signal = 0; signal < kSignals; ++signal)
    for (std::size_t asset = 0; asset < assets; ++asset)
      out[1 + assets + signal * assets + asset] =
          static_cast<float>(market.signal(day, asset, static_cast<Signal>(signal)));
}

}  // namespace

TradingEnvironment::TradingEnvironment(const Market& market, const EnvironmentOptions& options)
    : market_(&market), options_(options), holdings_(market.assets()), purchases_(market.assets()) {
  reset(0);
}

void TradingEnvironment::reset(std::size_t day) {
  day_ = day;
  cash_ = options_.initial_cash;
  costs_ = 0;
  std::fill(holdings_.begin(), holdings_.end(), 0.0);
}

double TradingEnvironment::value() const {
  double value = cash_;
  for (std::size_t asset = 0; asset < holdings_.size(); ++asset)
    value += holdings_[asset] * market_->close(day_, asset);
  return value;
}

void TradingEnvironment::sell(std::size_t asset, double shares) {
  const double money = shares * market_->close(day_, asset), cost = money * options_.cost;
  holdings_[asset] -= shares;
  cash_ += money - cost;
  costs_ += cost;
}

double TradingEnvironment::step(std::span<const float> actions) {
  const double before = value();
  const bool turbulent = market_->turbulence(day_) > options_.turbulence_threshold;
  double wanted = 0;  // Money for purchases, including costs.
  for (std::size_t asset = 0; asset < holdings_.size(); ++asset) {
    const double price = market_->close(day_, asset);
    const double shares =
        std::clamp(static_cast<double>(actions[asset]), -1.0, 1.0) * options_.hmax.value_or(before / price);
    purchases_[asset] = turbulent ? 0 : std::max(shares, 0.0);
    wanted += purchases_[asset] * price * (1 + options_.cost);
    if (turbulent)
      sell(asset, holdings_[asset]);
    else if (shares < 0)
      sell(asset, std::min(-shares, holdings_[asset]));
  }
  const double factor = wanted > cash_ ? cash_ / wanted : 1;
  for (std::size_t asset = 0; asset < holdings_.size(); ++asset) {
    const double shares = purchases_[asset] * factor, money = shares * market_->close(day_, asset);
    holdings_[asset] += shares;
    cash_ -= money * (1 + options_.cost);
    costs_ += money * options_.cost;
  }
  cash_ = std::max(cash_, 0.0);  // Rounding may have made the cash slightly negative.
  ++day_;
  return value() / before - 1;
}

void TradingEnvironment::state(std::span<float> out) const {
  const double all = value();
  out[0] = static_cast<float>(cash_ / all);
  for (std::size_t asset = 0; asset < holdings_.size(); ++asset)
    out[1 + asset] = static_cast<float>(holdings_[asset] * market_->close(day_, asset) / all);
  write_signals(*market_, day_, out);
}

void TradingEnvironment::cash_state(const Market& market, std::size_t day, std::span<float> out) {
  out[0] = 1;
  std::fill_n(out.begin() + 1, market.assets(), 0.0F);
  write_signals(market, day, out);
}

}  // namespace clstm_ppo
