// Tier 2: torch/nn/module.h, through model.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "clstm_ppo/environment.h"
#include "clstm_ppo/model.h"
#include "clstm_ppo/normalizer.h"

namespace clstm_ppo {

/// Parallel episodes with the outputs of the model. On the model's device.
struct Rollout {
  at::Tensor states;           ///< [episodes, window + steps, state_size], from the first day of the first window.
  at::Tensor windows;          ///< Normalised: [episodes, steps + 1, window, state_size], a view.
  at::Tensor actions;          ///< As drawn, not yet clamped to -1 .. 1. [episodes, steps, assets]
  at::Tensor log_probability;  ///< [episodes, steps]
  at::Tensor rewards;          ///< [episodes, steps]
  at::Tensor values;           ///< The critic's outputs: [episodes, steps + 1]
  std::vector<Memory> memory;  ///< Before each sequence of `sequence` steps. [sequence]
  std::vector<std::vector<double>> equity;  ///< The portfolio's value. [episode][steps + 1]
  std::vector<double> costs;                ///< Per episode, as a share of the initial cash. [episode]
};

struct RolloutOptions {
  std::int64_t window = 16;    ///< Days in the model's window.
  std::int64_t steps = 128;    ///< Days per episode; a multiple of `sequence`.
  std::int64_t sequence = 16;  ///< Days between saved memories, from which training starts its sequences.
  std::function<void()> after_step = nullptr;  ///< Called after each day.
};

/// Runs one episode from each of `first_days`. Draws the actions with `exploration`, which gives the same actions on
/// each device. Without `exploration`, uses the policy's mean. The window begins `window - 1` days before each first
/// day.
Rollout run_episodes(CascadedLSTM& model, const RunningNormalizer& normalizer, const Market& market,
                     const EnvironmentOptions& environment, const std::vector<std::size_t>& first_days,
                     const RolloutOptions& options, std::optional<at::Generator> exploration);

}  // namespace clstm_ppo
