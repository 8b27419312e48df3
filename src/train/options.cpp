#include <ddpkit/train/options.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <ddpkit/parse_number.h>
#include <ddpkit/train/main.h>

#include "train/config_files.h"

namespace ddpkit::train {
namespace {

// Returns the names of all options of a program and its subcommands, without dashes.
std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    const std::vector<std::string>& long_names = option->get_lnames();
    names.insert(names.end(), long_names.begin(), long_names.end());
  }
  return names;
}

std::string did_you_mean(const std::string& word, const std::vector<std::string>& candidates, const char* prefix) {
  const std::string found = nearest(word, candidates);
  return found.empty() ? std::string() : fmt::format("; did you mean {}{}?", prefix, found);
}

// CLI11 config format that reads YAML instead of INI. The command line has priority, and CLI11 makes the same checks.
class YamlConfig : public CLI::Config {
 public:
  explicit YamlConfig(const CLI::App* app) : app_(app) {}

  std::string to_config(const CLI::App*, bool, bool, std::string) const override { return {}; }

  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
    std::string file = "the config file";
    if (const CLI::Option* option = app_->get_config_ptr(); option && option->count() > 0) {
      file = option->as<std::string>();
    }
    Found found;
    try {
      const YAML::Node root = YAML::Load(input);
      if (root.IsNull()) return found.items;
      if (!root.IsMap()) throw UsageError(fmt::format("{} must hold KEY: VALUE lines", file));
      collect(file, root, 0, found);
    } catch (const YAML::Exception& error) {
      throw UsageError(fmt::format("{}:{}: not valid YAML: {}", file, error.mark.line + 1, error.msg));
    }
    return found.items;
  }

 private:
  struct Found {
    std::vector<CLI::ConfigItem> items;
    std::set<std::string> seen;
    int values = 0;
  };

  void collect(const std::string& file, const YAML::Node& map, int depth, Found& found) const {
    for (const auto& entry : map) {
      const std::string at = fmt::format("{}:{}", file, entry.first.Mark().line + 1);
      if (depth > kMostConfigLevels)
        throw UsageError(fmt::format("{}: nested more than {} levels deep", at, kMostConfigLevels));
      if (++found.values > kMostConfigValues)
        throw UsageError(fmt::format("{}: more than {} values in all", at, kMostConfigValues));
      if (!entry.first.IsScalar()) throw UsageError(fmt::format("{}: a key must be the name of an option", at));
      const std::string& key = entry.first.Scalar();
      const CLI::Option* option = app_->get_option_no_throw("--" + key);
      const bool is_known = option && option->get_configurable();
      if (entry.second.IsMap() && !is_known) {
        collect(file, entry.second, depth + 1, found);
        continue;
      }
      if (!is_known) {
        std::vector<std::string> names;
        for (const std::string& name : option_names(*app_)) {
          if (app_->get_option_no_throw("--" + name)->get_configurable()) names.push_back(name);
        }
        throw UsageError(fmt::format("{}: unknown option '{}'{}", at, key, did_you_mean(key, names, "")));
      }
      if (!found.seen.insert(key).second) throw UsageError(fmt::format("{}: '{}' is given twice", at, key));
      CLI::ConfigItem item;
      item.name = key;
      if (entry.second.IsScalar()) {
        item.inputs.push_back(entry.second.Scalar());
      } else if (entry.second.IsSequence()) {
        for (const auto& value : entry.second) item.inputs.push_back(value.Scalar());
      } else {
        throw UsageError(fmt::format("{}: '{}' needs a value", at, key));
      }
      found.items.push_back(std::move(item));
    }
  }

  const CLI::App* app_;
};

}  // namespace

std::string nearest(const std::string& word, const std::vector<std::string>& candidates) {
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(2, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    std::vector<std::size_t> row(candidate.size() + 1);  // [characters of candidate] edits from word's prefix
    std::iota(row.begin(), row.end(), std::size_t{0});
    for (std::size_t i = 1; i <= word.size(); ++i) {
      std::size_t diagonal = std::exchange(row[0], i);
      for (std::size_t j = 1; j <= candidate.size(); ++j) {
        const std::size_t replaced = diagonal + (word[i - 1] == candidate[j - 1] ? 0 : 1);
        diagonal = row[j];
        row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
      }
    }
    if (row.back() < best_distance) {
      best_distance = row.back();
      best = candidate;
    }
  }
  return best;
}

std::string describe_parse_error(const CLI::App& app, const CLI::ParseError& error) {
  if (dynamic_cast<const CLI::ExtrasError*>(&error)) {
    const CLI::App* command = &app;
    for (const CLI::App* subcommand : app.get_subcommands()) {
      if (!subcommand->remaining().empty()) command = subcommand;
    }
    const std::vector<std::string> extras = command->remaining();
    if (!extras.empty() && extras.front().starts_with("-")) {
      const std::string flag = extras.front().substr(0, extras.front().find('='));
      const std::string word = flag.substr(std::min(flag.find_first_not_of('-'), flag.size()));
      return fmt::format("unknown option {}{}", flag, did_you_mean(word, option_names(*command), "--"));
    }
    if (!extras.empty()) return fmt::format("unexpected argument '{}'", extras.front());
  }
  return error.what();
}

void add_config_option(CLI::App& app) {
  app.set_config("--config", "", "YAML file with any of these options: OPTION: VALUE")->type_name("FILE");
  app.config_formatter(std::make_shared<YamlConfig>(&app));
  app.get_config_ptr()->configurable(false);
  if (CLI::Option* help = app.get_help_ptr()) help->configurable(false);
}

void add_trainer_options(CLI::App& app, TrainerOptions& options) {
  app.get_formatter()->column_width(34);
  app.option_defaults()->always_capture_default();
  const std::string group = "Training";
  const int most = std::numeric_limits<int>::max();
  app.add_option("--epochs", options.epochs, "Passes over the training set")
      ->check(whole_number(1, most))
      ->type_name("N")
      ->group(group);
  app.add_option("--batch-size", options.batch_size, "Samples a step, on each rank")
      ->check(whole_number(1, most))
      ->type_name("N")
      ->group(group);
  app.add_option("--lr", options.lr, "Learning rate")->check(positive_number())->type_name("X")->group(group);
  app.add_option("--seed", options.seed, "Same seed, same weights")
      ->check(whole_number(0))
      ->type_name("N")
      ->group(group);
  app.add_option("--max-steps", options.max_steps, "Stop after N optimizer steps")
      ->check(whole_number(1))
      ->type_name("N")
      ->group(group);
  app.add_option("--backend", options.backend, "shm, gloo, nccl or hierarchical; chosen by device when not given")
      ->check(CLI::IsMember({"shm", "gloo", "nccl", "hierarchical"}))
      ->type_name("NAME")
      ->capture_default_str()
      ->group(group);
  const std::string run = "Run";
  CLI::Option* save_dir =
      app.add_option("--save-dir", options.save_dir, "Folder for the run's checkpoint; without it none is written")
          ->type_name("FOLDER")
          ->group(run);
  CLI::Option* resume = app.add_flag("--resume", options.resume,
                                     "Fail if --save-dir has no run to resume (default: resume if there is one)");
  resume->needs(save_dir)->group(run);
  app.add_flag("--overwrite", options.overwrite, "Replace the run in --save-dir; not what a restarted job wrote itself")
      ->excludes(resume)
      ->group(run);
  app.add_flag("--json", options.json, "Print one line of JSON a finished epoch; the last line, the result, stays text")
      ->group(run);
  add_config_option(app);
  app.get_config_ptr()->group(run);
}

void add_checkpoint_options(CLI::App& app, TrainerOptions& options) {
  app.add_option("--checkpoint-steps", options.checkpoint_steps,
                 "Save every N optimizer steps too, not only after each epoch; 0: no")
      ->check(whole_number(0))
      ->needs(app.get_option("--save-dir"))
      ->type_name("N")
      ->group("Run");
  app.add_option("--keep-checkpoints", options.keep_checkpoints, "Keep the last N")
      ->check(whole_number(1, std::numeric_limits<int>::max()))
      ->needs(app.get_option("--save-dir"))
      ->type_name("N")
      ->group("Run");
}

}  // namespace ddpkit::train
