#include "clstm_ppo/rollout.h"

#include <torch/torch.h>

#include <utility>

#include "clstm_ppo/ppo.h"

namespace clstm_ppo {
namespace {

// The environments of a rollout and the states that they produce.
class SideBySide {
 public:
  SideBySide(const Market& market, const EnvironmentOptions& options, const std::vector<std::size_t>& first_days,
             std::int64_t window, std::int64_t steps)
      : state_size_(static_cast<std::int64_t>(TradingEnvironment::state_size(market.assets()))),
        rows_(window + steps),
        states_(torch::zeros({static_cast<std::int64_t>(first_days.size()), rows_, state_size_})) {
    for (std::size_t episode = 0; episode < first_days.size(); ++episode) {
      environments_.emplace_back(market, options).reset(first_days[episode]);
      const std::size_t before = static_cast<std::size_t>(window - 1);
      for (std::size_t row = 0; row < before; ++row)
        TradingEnvironment::cash_state(market, first_days[episode] - before + row, place(episode, row));
      environments_.back().state(place(episode, before));
      equity_.push_back({environments_.back().value()});
    }
    row_ = static_cast<std::size_t>(window);
  }

  // `actions`: [episode, asset] on the CPU. Returns the rewards.
  at::Tensor step(const at::Tensor& actions) {
    const at::Tensor rewards = torch::empty({static_cast<std::int64_t>(environments_.size())});
    const auto assets = static_cast<std::size_t>(actions.size(1));
    for (std::size_t episode = 0; episode < environments_.size(); ++episode) {
      const float* const action = actions.const_data_ptr<float>() + episode * assets;
      rewards.data_ptr<float>()[episode] = static_cast<float>(environments_[episode].step({action, assets}));
      environments_[episode].state(place(episode, row_));
      equity_[episode].push_back(environments_[episode].value());
    }
    ++row_;
    return rewards;
  }

  const at::Tensor& states() const { return states_; }
  const std::vector<std::vector<double>>& equity() const { return equity_; }
  const std::vector<TradingEnvironment>& environments() const { return environments_; }

 private:
  std::span<float> place(std::size_t episode, std::size_t row) {
    const auto rows = static_cast<std::size_t>(rows_), size = static_cast<std::size_t>(state_size_);
    return {states_.data_ptr<float>() + (episode * rows + row) * size, size};
  }

  std::int64_t state_size_, rows_;
  at::Tensor states_;  // [episode, row, state]
  std::size_t row_ = 0;
  std::vector<TradingEnvironment> environments_;
  std::vector<std::vector<double>> equity_;
};

}  // namespace

Rollout run_episodes(CascadedLSTM& model, const RunningNormalizer& normalizer, const Market& market,
                     const EnvironmentOptions& environment, const std::vector<std::size_t>& first_days,
                     const RolloutOptions& options, std::optional<at::Generator> exploration) {
  const torch::NoGradGuard no_grad;
  const at::Device device = model.parameters().front().device();
  SideBySide episodes(market, environment, first_days, options.window, options.steps);
  Memory memory = model.no_memory(static_cast<std::int64_t>(first_days.size()));
  Rollout rollout;
  std::vector<at::Tensor> actions, log_probability, rewards, values;
  for (std::int64_t step = 0; step <= options.steps; ++step) {
    const at::Tensor window = normalizer(episodes.states().narrow(1, step, options.window).to(device)).unsqueeze(1);
    if (step % options.sequence == 0 && step < options.steps) rollout.memory.push_back(memory);
    auto [means, judged, log_std, after] = model.forward(window, memory);
    values.push_back(judged.squeeze(1));
    if (step == options.steps) break;
    memory = std::move(after);
    at::Tensor action = means.squeeze(1);
    if (exploration) {
      const at::Tensor noise = torch::randn(action.sizes(), *exploration, torch::TensorOptions()).to(device);
      action = action + log_std.exp() * noise;
    }
    log_probability.push_back(clstm_ppo::log_probability(action, means.squeeze(1), log_std));
    rewards.push_back(episodes.step(action.to(torch::kCPU).contiguous()));
    actions.push_back(std::move(action));
    if (options.after_step) options.after_step();
  }
  rollout.states = episodes.states().to(device);
  rollout.windows = normalizer(rollout.states).unfold(1, options.window, 1).transpose(2, 3);
  rollout.actions = torch::stack(actions, 1);
  rollout.log_probability = torch::stack(log_probability, 1);
  rollout.rewards = torch::stack(rewards, 1).to(device);
  rollout.values = torch::stack(values, 1);
  rollout.equity = episodes.equity();
  for (const TradingEnvironment& one : episodes.environments())
    rollout.costs.push_back(one.costs() / environment.initial_cash);
  return rollout;
}

}  // namespace clstm_ppo
