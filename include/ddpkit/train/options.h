// Tier 0: the standard library only. CLI11 is only declared.
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

/// The options of every trainer. A trainer sets its defaults before it adds the options.
struct TrainerOptions {
  int epochs = 10;                                       ///< Passes over the training set.
  int batch_size = 32;                                   ///< Samples per step and rank.
  double lr = 1e-3;                                      ///< Learning rate.
  std::uint64_t seed = 0;                                ///< The same seed gives bit-identical weights.
  std::optional<std::int64_t> max_steps = std::nullopt;  ///< Stop after this number of optimizer steps.
  std::string save_dir = {};                             ///< Folder for the run's checkpoint; empty: no checkpoint.
  std::int64_t checkpoint_steps = 0;                     ///< Steps between checkpoints within an epoch; 0: none.
  int keep_checkpoints = 1;                              ///< See CheckpointOptions::keep.
  bool resume = false;                                   ///< See RunFolderOptions.
  bool overwrite = false;                                ///< Replace another run's checkpoint in save_dir.
  bool json = false;                                     ///< Print one JSON line per epoch instead of the table.
  std::string backend = {};                              ///< See InitOptions::backend.
};

/// Adds --epochs, --batch-size, --lr, --seed, --max-steps, --save-dir, --resume, --overwrite, --json, --backend and
/// --config to a program. `options` must outlive the parse. Its values are the defaults in --help.
void add_trainer_options(CLI::App& app, TrainerOptions& options);

/// Adds --checkpoint-steps and --keep-checkpoints, for trainers that can save within an epoch.
void add_checkpoint_options(CLI::App& app, TrainerOptions& options);

/// Adds --config FILE: YAML whose keys are the program's long option names, grouped into sections or not. The command
/// line overrides the file. App::parse() throws UsageError for an error in the file: an unknown key (the error suggests
/// the nearest known one), a duplicate key, invalid YAML.
void add_config_option(CLI::App& app);

/// A check for CLI::Option::check(): a number above 0. Accepts only the format of parse_number(), without infinity and
/// NaN, which the range checks of CLI11 accept.
CLI::Validator positive_number();
/// The same for numbers from 0.
CLI::Validator number_from_zero();
/// The same for integers. Both ends are allowed.
CLI::Validator whole_number(std::int64_t least, std::int64_t most = std::numeric_limits<std::int64_t>::max());
/// The same for numbers in a range. Both ends are allowed.
CLI::Validator number_between(double least, double most);

/// Checks a number of ranks to start: 1 to 4096, gpu, cpu, or auto.
CLI::Validator rank_count();
/// Returns the number of ranks for such a text on a host with `gpus` GPUs. gpu: one per GPU. cpu: one per core that
/// this process may use. auto: gpu if there is a GPU, otherwise cpu. Throws InvalidArgument for gpu without a GPU.
int count_ranks(const std::string& text, int gpus);

/// Describes an error of CLI11 in one sentence. For an unknown option it suggests the nearest known one.
std::string describe_parse_error(const CLI::App& app, const CLI::ParseError& error);

/// Returns the candidate with the smallest edit distance to `word`; empty if none is close enough to be a typing error.
std::string nearest(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace ddpkit::train
