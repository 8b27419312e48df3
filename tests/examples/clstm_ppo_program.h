// Runs the program `clstm_ppo` and reads its results.
#pragma once

#include <torch/torch.h>

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/train/checkpoint.h>

#include "clstm_ppo/generate.h"
#include "clstm_ppo/model.h"
#include "clstm_ppo/options.h"
#include "support/program.h"

namespace clstm_ppo::testing {

using ddpkit::testing::Arguments;
using ddpkit::testing::Folder;
using ddpkit::testing::joined;
using ddpkit::testing::Kill;
using ddpkit::testing::names_in;
using ddpkit::testing::read_file;
using ddpkit::testing::run_until_not_killed;
using ddpkit::testing::same_bits;
using ddpkit::testing::write_file;

using Run = ddpkit::testing::ProgramRun;

inline Run run_clstm_ppo(int ranks, const Arguments& arguments, std::optional<Kill> kill = std::nullopt) {
  return ddpkit::testing::run_program(DDPKIT_TEST_CLSTM_PPO, ranks, arguments, kill);
}

/// The market of all tests of this process: 2 assets, 500 days.
inline const std::string& generated() {
  static const Folder folder;
  static const std::string path = [] {
    generate(folder / "set", {.assets = 2, .days = 500});
    return (folder / "set").string();
  }();
  return path;
}

/// Options of a small model and short episodes on that market, for tests that do not test learning. 8 episodes per
/// round and rank.
inline TrainOptions quick_options() {
  TrainOptions options;
  options.run.save = false;
  options.run.batch_size = 16;
  options.run.lr = 1e-2;
  options.data = generated();
  options.envs = 8;
  options.episode_steps = 16;
  options.window = 6;
  options.sequence = 8;
  options.run.grad_accum_steps = 3;
  options.ppo_epochs = 2;
  options.hidden = 8;
  return options;
}

/// Returns the same options as a command line.
inline Arguments quick() {
  return {"--data",
          generated(),
          "--batch_size",
          "16",
          "--lr",
          "1e-2",
          "--envs",
          "8",
          "--window",
          "6",
          "--episode-steps",
          "16",
          "--sequence",
          "8",
          "--grad_accum_steps",
          "3",
          "--ppo-epochs",
          "2",
          "--hidden",
          "8",
          "--json"};
}

/// Reads the weights from the checkpoint of a run.
inline std::vector<at::Tensor> weights_of(const Folder& save_dir) {
  CascadedLSTM model({.state_size = 13, .assets = 2, .hidden = 8});
  ddpkit::optim::FusedAdam optimizer(model.parameters());
  ddpkit::train::read_checkpoint(save_dir / "checkpoint.pt", model, optimizer);
  return model.parameters();
}

/// Checks that the program exits with `code` and prints one sentence, once.
inline void check_refused(const Arguments& arguments, int code, const std::string& message,
                          const std::vector<int>& worlds = {1}) {
  ddpkit::testing::check_program_refuses(DDPKIT_TEST_CLSTM_PPO, arguments, code, message, worlds);
}

}  // namespace clstm_ppo::testing
