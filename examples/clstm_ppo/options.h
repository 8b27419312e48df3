// Tier 0: the standard library only. CLI11 is declared, not included.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ddpkit/train/options.h>

#include "clstm_ppo/generate.h"
#include "clstm_ppo/ppo.h"

namespace clstm_ppo {

/// What `clstm_ppo --help` lists.
struct TrainOptions {
  /// A batch is of days; `epochs` and `checkpoint_steps` are not used.
  ddpkit::train::TrainerOptions trainer = {.batch_size = 128, .lr = 2e-3};

  std::string data;                 ///< Folder of NAME.csv.
  std::vector<std::string> assets;  ///< Of those; empty: all.
  double test_share = 0.25;         ///< The last part of the days, which training never sees.
  bool shuffle_prices = false;      ///< The control: the same moves in another order.

  double initial_cash = 1e6;
  std::optional<double> hmax;  ///< See EnvironmentOptions.
  double cost = 0.001;
  double turbulence_share = 0.99;  ///< Training days that count as calm; 1: all days do.

  int num_gpus = -1;        ///< Of a host; -1: all.
  int num_episodes = 5000;  ///< Of all ranks together.
  int envs = 16;            ///< Episodes that each rank runs side by side, and then learns from.
  int episode_steps = 128;
  int window = 16;
  int sequence = 16;
  int grad_accum_steps = 4;
  int ppo_epochs = 4;
  double reward_scale = 100;  ///< So that a reward is the change in percent.
  bool lr_decay = true;
  PpoOptions ppo;
  int threads = 1;  ///< Of each rank on the CPU.
  bool amp = true;
  bool tf32 = true;
  bool cudnn_benchmark = true;

  int hidden = 64;
  double log_std = -0.5;

  int evaluate_every = 0;  ///< Rounds; 0: at the end only.
  bool tensorboard = false;
  std::string plot;  ///< Where the equity curve goes; empty: SAVE_DIR/equity.svg.
};

/// Adds all of them to a program; `options` must outlive the parse.
void add_train_options(CLI::App& app, TrainOptions& options);

/// Adds `generate`; `folder` and `options` must outlive the parse.
CLI::App* add_generate_command(CLI::App& app, std::string& folder, GenerateOptions& options);

/// A command line in which option names may also be written with underscores, as Python's trainers have them.
std::vector<std::string> with_dashes(int argc, const char* const* argv);

}  // namespace clstm_ppo
