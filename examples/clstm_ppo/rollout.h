// Tier 2: torch/nn/module.h, through model.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "clstm_ppo/environment.h"
#include "clstm_ppo/model.h"
#include "clstm_ppo/normalizer.h"

namespace clstm_ppo {

/// Episodes that ran side by side, and what the model said in them. On the model's device.
struct Rollout {
  at::Tensor states;           ///< [episodes, window + steps, state_size], from the first window's first day on.
  at::Tensor windows;          ///< Normalised: [episodes, steps + 1, window, state_size], a view.
  at::Tensor actions;          ///< As drawn, not yet cut to -1 .. 1. [episodes, steps, assets]
  at::Tensor log_probability;  ///< [episodes, steps]
  at::Tensor rewards;          ///< [episodes, steps]
  at::Tensor values;           ///< What the critic expected: [episodes, steps + 1]
  std::vector<Memory> memory;  ///< Before each `sequence` steps. [sequence]
  std::vector<std::vector<double>> equity;  ///< The portfolio's value. [episode][steps + 1]
  std::vector<double> costs;                ///< Of each episode, as a share of the initial cash. [episode]
};

struct RolloutOptions {
  std::int64_t window = 16;    ///< Days that the model sees at once.
  std::int64_t steps = 128;    ///< Days of an episode; a multiple of `sequence`.
  std::int64_t sequence = 16;  ///< Days after which the memory is kept, for training to begin from.
};

/// Runs an episode from each of `first_days` on. Actions are drawn with `exploration`, which makes them the same on
/// every device; without it the policy's mean is taken. The window reaches back `window - 1` days before each first
/// day.
Rollout run_episodes(CascadedLSTM& model, const RunningNormalizer& normalizer, const Market& market,
                     const EnvironmentOptions& environment, const std::vector<std::size_t>& first_days,
                     const RolloutOptions& options, std::optional<at::Generator> exploration);

}  // namespace clstm_ppo
