// Tier 2: torch/nn/module.h. Shared by trainer.cpp and trainer_state.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ddpkit/train/run.h>
#include <ddpkit/train/seed.h>

#include "clstm_ppo/learner.h"
#include "clstm_ppo/trainer.h"

namespace clstm_ppo {

struct DistributedCLSTMPPOTrainer::State {
  State(const TrainOptions& given, ddpkit::ProcessGroup ranks) : options(given), group(std::move(ranks)) {
    declare(declared, options);
  }

  std::int64_t episodes_a_round() const { return std::int64_t{options.envs} * group.world_size(); }
  std::int64_t rounds() const { return (options.num_episodes + episodes_a_round() - 1) / episodes_a_round(); }

  /// Seed of the current round on this rank. `part` 0: exploration, 1: shuffling.
  std::uint64_t seed(int part) const {
    return ddpkit::train::epoch_seed(options.run.seed, 2 * run->epoch() + part, group.rank());
  }

  void make_run();
  void read_market();
  void make_model();
  void start();
  std::string plot() const;  ///< File of the equity curve; empty: none.
  void check_plot() const;   ///< Checks that the file is writable.
  void finish(const TestResult& test);

  TrainOptions options;
  ddpkit::train::Options declared{"clstm_ppo", ""};
  ddpkit::ProcessGroup group;
  std::optional<Market> market;
  Period training, test;
  EnvironmentOptions environment;
  std::optional<RunningNormalizer> normalizer;
  std::optional<ddpkit::train::Run> run;  // An epoch is a round.
  std::optional<Learner> learner;
  std::optional<ddpkit::train::Epoch> round;  // From the start of its episodes.
  std::function<void()> update_hook;
};

}  // namespace clstm_ppo
