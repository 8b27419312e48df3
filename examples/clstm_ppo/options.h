// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ddpkit/train/run_options.h>

#include "clstm_ppo/generate.h"
#include "clstm_ppo/ppo.h"

namespace clstm_ppo {

/// The options of `clstm_ppo`.
struct TrainOptions {
  /// The batch size is in days.
  ddpkit::train::RunOptions run = {.batch_size = 128, .lr = 2e-3, .grad_accum_steps = 4, .launch = {.num_gpus = -1}};

  std::string data;                 ///< Folder of NAME.csv; empty: data/planted, a synthetic market.
  std::vector<std::string> assets;  ///< Names of files in the folder; empty: all.
  double test_share = 0.25;         ///< The last part of the days, held out from training.
  bool shuffle_prices = false;      ///< Control experiment: the same moves in shuffled order.

  double initial_cash = 1e6;
  std::optional<double> hmax;  ///< See EnvironmentOptions.
  double cost = 0.001;
  double turbulence_share = 0.99;  ///< Share of training days that count as calm; 1: all days.

  int num_episodes = 5000;  ///< Over all ranks.
  int envs = 16;            ///< Parallel episodes per rank and round.
  int episode_steps = 128;
  int window = 16;
  int sequence = 16;
  int ppo_epochs = 4;
  double reward_scale = 100;  ///< 100: a reward is the change in percent.
  bool lr_decay = true;
  PpoOptions ppo;
  int threads = 1;  ///< Per rank on the CPU.
  bool tf32 = true;
  bool cudnn_benchmark = true;

  int hidden = 64;
  double log_std = -0.5;

  int eval_every = 0;  ///< In rounds; 0: at the end only.
  std::string plot;    ///< File of the equity curve; empty: SAVE_DIR/equity.svg.
};

/// Declares all options. `ppo` must outlive the parse.
void declare(ddpkit::train::Options& options, TrainOptions& ppo);

/// Declares the options of the command `generate`. `folder` and `set` must outlive the parse.
void declare(ddpkit::train::Options& options, std::string& folder, GenerateOptions& set);

}  // namespace clstm_ppo
