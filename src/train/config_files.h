// Tier 0. Reads the entries of Config from YAML.
#pragma once

#include <ddpkit/train/config.h>

namespace YAML {
class Node;
}

namespace ddpkit::train {

/// Maximum number of values in config files. A YAML alias repeats its value and may contain itself.
constexpr int kMostConfigValues = 10'000;
constexpr int kMostConfigLevels = 64;

/// Collects the entries of one Config from several files. Limits number, size and depth.
struct Config::Loader {
  std::map<std::string, Entry>& entries;
  std::vector<std::filesystem::path> under_way = {};  ///< Files being included, the outermost first.
  int files = 0;
  int values = 0;

  void load(const std::filesystem::path& file, const std::string& included_from);
  /// Adds all keys of `text`. Follows a `defaults:` list if `folder` is given.
  void add(const std::string& text, const std::string& name, const std::optional<std::filesystem::path>& folder);
  /// The source of each value is `name`, or FILE:LINE with `has_lines`.
  void flatten(const std::string& key, const YAML::Node& node, const std::string& name, bool has_lines, int depth,
               std::map<std::string, Entry>& into);

 private:
  void follow(const YAML::Node& defaults, const std::string& name, const std::filesystem::path& folder);
};

}  // namespace ddpkit::train
