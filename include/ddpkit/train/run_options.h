// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <vector>

#include <ddpkit/optim/learning_rate.h>
#include <ddpkit/train/launch.h>
#include <ddpkit/train/options.h>

namespace ddpkit {
class ProcessGroup;
}

namespace ddpkit::train {

/// The options of trainers. A trainer sets its defaults before it declares them, and removes options that it does not
/// use.
struct RunOptions {
  int epochs = 10;      ///< Passes over the training set.
  int batch_size = 32;  ///< Samples per update and device.
  double lr = 1e-3;     ///< Learning rate.
  /// Growth of the learning rate with the number of devices.
  optim::LearningRateScaling lr_scaling = optim::LearningRateScaling::kNone;
  std::string lr_schedule = "cosine";                    ///< Or "constant".
  double warmup_epochs = 0;                              ///< Epochs of learning rate warm-up.
  double weight_decay = 0.01;                            ///< Weight decay of the optimizer.
  double max_grad_norm = 0;                              ///< 0: no limit.
  int grad_accum_steps = 1;                              ///< Batches per update and device.
  bool amp = true;                                       ///< Mixed precision, if the device supports it efficiently.
  std::uint64_t seed = 0;                                ///< The same seed gives bit-identical weights.
  std::optional<std::int64_t> max_steps = std::nullopt;  ///< Stop after this number of updates.
  int num_workers = 0;                                   ///< Threads per rank that prepare batches.
  std::string backend = {};                              ///< See InitOptions::backend.
  bool sync_batchnorm = false;                           ///< Synchronizes batch norm over all ranks.
  SelfLaunchOptions launch = {};                         ///< The ranks that the program starts.
  bool elastic = false;                                  ///< Continue without a lost rank: see Run::retry().
  int min_ranks = 1;                                     ///< With `elastic`: fail with fewer ranks.
  int max_replacements = 0;                              ///< With `elastic`: new processes for lost ranks.
  bool save = true;                                      ///< False: the run writes no files.
  std::string save_dir = {};                             ///< Folder of the run; empty: see default_run_folder().
  std::int64_t save_steps = 0;                           ///< Updates between checkpoints within an epoch; 0: none.
  int save_total_limit = 1;                              ///< See CheckpointOptions::keep.
  bool resume = false;                                   ///< See RunFolderOptions.
  bool overwrite = false;                                ///< Replace another run's checkpoint in save_dir.
  bool tensorboard = true;                               ///< Write TensorBoard events to SAVE_DIR/logs.
  std::int64_t logging_steps = 0;                        ///< Print the loss every N updates; 0: never.
  bool profile = false;                                  ///< Time the phases of updates 11 to 30; write trace.json.
  bool json = false;                                     ///< Print one JSON line per epoch instead of the table.
  std::string progress = "auto";                         ///< Or "bar", "lines", "off"; see --help.
};

/// Declares all of them. `run` must outlive the parse. Its values are the defaults in --help.
void declare(Options& options, RunOptions& run);

/// Returns `named`. If it is empty, returns `standard`, which one rank per host generates first if the folder does not
/// exist. Collective.
std::string data_folder(const std::string& named, const std::string& standard,
                        const std::function<void(const std::string& folder)>& generate, const ProcessGroup& group);

}  // namespace ddpkit::train
