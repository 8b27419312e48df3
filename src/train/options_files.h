// Tier 0: the standard library only. Reads option values from YAML.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace ddpkit::train {

/// A value that a config file or an argument gives.
struct GivenValue {
  std::string key = {};                  ///< With sections: "training.lr".
  std::vector<std::string> values = {};  ///< Several for a list.
  bool is_list = false;
  std::string where = {};  ///< "FILE:LINE: "; empty for the command line.
  int file = 0;            ///< Number of the file.
};

/// Returns the values of a file after the values of its `defaults:`, in the order in which they apply. `defaults:
/// [base_config, distributed]` names files beside the file; ".yaml" may be omitted. Throws UsageError if a file is
/// missing, is not YAML, has a duplicate key, includes itself, or is too large or deep (64 levels, 1 MiB, 10,000
/// values; an alias counts at each use).
std::vector<GivenValue> read_option_file(const std::filesystem::path& file);
/// Parses a text without `defaults:`. JSON is valid YAML.
std::vector<GivenValue> read_option_text(const std::string& text, const std::string& name);
/// Parses "training.lr=2e-3", with the value as YAML: "data.include=[digits/, letters/]".
std::vector<GivenValue> read_assignment(const std::string& assignment);

}  // namespace ddpkit::train
