// Tier 0. How Config gets its entries out of YAML.
#pragma once

#include <ddpkit/train/config.h>

namespace YAML {
class Node;
}

namespace ddpkit::train {

/// What config files may hold at most: aliases repeat what they stand for, itself among it.
constexpr int kMostConfigValues = 10'000;
constexpr int kMostConfigLevels = 64;

/// Collects the entries of one Config from any number of files, within bounds on their number, size and depth.
struct Config::Loader {
  std::map<std::string, Entry>& entries;
  std::vector<std::filesystem::path> under_way = {};  ///< Files that include one another, the outermost first.
  int files = 0;
  int values = 0;

  void load(const std::filesystem::path& file, const std::string& included_from);
  /// All keys of `text`; a `defaults:` list is followed where `folder` is given.
  void add(const std::string& text, const std::string& name, const std::optional<std::filesystem::path>& folder);
  /// `where` for all of it, or FILE:LINE of each value where `line_of` is the file.
  void flatten(const std::string& key, const YAML::Node& node, const std::string& name, bool has_lines, int depth,
               std::map<std::string, Entry>& into);

 private:
  void follow(const YAML::Node& defaults, const std::string& name, const std::filesystem::path& folder);
};

}  // namespace ddpkit::train
