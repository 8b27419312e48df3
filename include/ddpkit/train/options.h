// Tier 0: the standard library only. CLI11 is declared, not included.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
class ParseError;
class Validator;
}  // namespace CLI

namespace ddpkit::train {

/// The options that every trainer has. A trainer sets its own defaults before it adds them.
struct TrainerOptions {
  int epochs = 10;                                       ///< Passes over the training set.
  int batch_size = 32;                                   ///< Samples a step, on each rank.
  double lr = 1e-3;                                      ///< Learning rate.
  std::uint64_t seed = 0;                                ///< Same seed, same weights, to the bit.
  std::optional<std::int64_t> max_steps = std::nullopt;  ///< Stop after so many optimizer steps.
  std::string save_dir = {};                             ///< Folder of the run's checkpoint; empty: none is written.
  std::int64_t checkpoint_steps = 0;                     ///< Also every so many steps within an epoch; 0: no.
  int keep_checkpoints = 1;                              ///< See CheckpointOptions::keep.
  bool resume = false;                                   ///< See RunFolderOptions.
  bool overwrite = false;                                ///< Replace another run's checkpoint in save_dir.
  bool json = false;                                     ///< One JSON line a finished epoch instead of the table.
  std::string backend = {};                              ///< See InitOptions::backend.
};

/// Adds --epochs, --batch-size, --lr, --seed, --max-steps, --save-dir, --resume, --overwrite, --json, --backend and
/// --config to a program. `options` must outlive the parse; the values in it are the defaults that --help shows.
void add_trainer_options(CLI::App& app, TrainerOptions& options);

/// Adds --checkpoint-steps and --keep-checkpoints, for trainers that can save within an epoch.
void add_checkpoint_options(CLI::App& app, TrainerOptions& options);

/// Adds --config FILE: YAML whose keys are the program's long option names, grouped into sections or not. The command
/// line wins over the file. What is wrong with the file (an unknown key, which is named with the nearest known one; a
/// key given twice; no YAML) throws UsageError out of App::parse().
void add_config_option(CLI::App& app);

/// Checks for CLI::Option::check(). Strict: digits as parse_number() takes them, and nothing else; neither an infinity
/// nor a NaN, which no range of CLI11's refuses, is a number.
CLI::Validator positive_number();
CLI::Validator number_from_zero();
CLI::Validator whole_number(std::int64_t least, std::int64_t most = std::numeric_limits<std::int64_t>::max());
/// Both ends are allowed.
CLI::Validator number_between(double least, double most);

/// A number of ranks to start: 1 to 4096, gpu, cpu, or auto.
CLI::Validator rank_count();
/// The number that such a text stands for on a host with `gpus` GPUs: gpu is one per GPU, cpu one per core that this
/// process may use, auto gpu if there is a GPU and cpu otherwise. Throws InvalidArgument for gpu without a GPU.
int count_ranks(const std::string& text, int gpus);

/// One sentence for what CLI11 found wrong with a command line; for an unknown option it names the nearest known one.
std::string describe_parse_error(const CLI::App& app, const CLI::ParseError& error);

/// The candidate closest to `word` by edit distance; empty when none is near enough to be a slip of the pen.
std::string nearest(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace ddpkit::train
