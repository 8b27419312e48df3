#include "train/options_files.h"

#include <fstream>
#include <optional>
#include <set>

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <ddpkit/train/options.h>

namespace ddpkit::train {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostBytes = 1 << 20;
constexpr int kMostFiles = 100;
/// A YAML alias repeats its value and may contain itself.
constexpr int kMostValues = 10'000;
constexpr int kMostLevels = 64;

std::string read_text(const fs::path& file, const std::string& included_from) {
  const std::string by = included_from.empty() ? "" : fmt::format(", which {} includes", included_from);
  if (!fs::is_regular_file(file)) throw UsageError(fmt::format("there is no config file {}{}", file.string(), by));
  std::ifstream input(file, std::ios::binary);
  std::string text(kMostBytes + 1, '\0');
  input.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(input.gcount()));
  if (input.bad() || (!input && !input.eof()))
    throw UsageError(fmt::format("cannot read the config file {}{}", file.string(), by));
  if (text.size() > kMostBytes)
    throw UsageError(fmt::format("{} is larger than 1 MiB: a config file is smaller", file.string()));
  return text;
}

/// Collects values from files. Limits number, size and depth.
class Reader {
 public:
  std::vector<GivenValue> values;

  void load(const fs::path& file, const std::string& included_from) {
    std::error_code error;
    const fs::path canonical = fs::weakly_canonical(file, error);
    for (const fs::path& outer : including_) {
      if (outer == canonical)
        throw UsageError(fmt::format("{}: {} includes itself through its defaults", included_from, file.string()));
    }
    if (++files_ > kMostFiles)
      throw UsageError(fmt::format("{}: more than {} files in all", included_from, kMostFiles));
    including_.push_back(canonical);
    add(read_text(file, included_from), file.string(), file.parent_path());
    including_.pop_back();
  }

  /// Follows a `defaults:` list if `folder` is given.
  void add(const std::string& text, const std::string& name, const std::optional<fs::path>& folder) try {
    const YAML::Node root = YAML::Load(text);
    if (root.IsNull()) return;
    if (!root.IsMap()) throw UsageError(fmt::format("{} must hold KEY: VALUE lines", name));
    if (const YAML::Node defaults = root["defaults"]; defaults && folder) follow(defaults, name, *folder);
    ++file_;
    flatten("", root, name, at(name, root), 0);
    if (folder) std::erase_if(values, [](const GivenValue& value) { return value.key == "defaults"; });
  } catch (const YAML::Exception& error) {
    throw UsageError(fmt::format("{}:{}: not valid YAML: {}", name, error.mark.line + 1, error.msg));
  }

  /// `name`: of the file; empty for the command line. `where`: the place of the key.
  void flatten(const std::string& key, const YAML::Node& node, const std::string& name, const std::string& where,
               int depth) {
    if (depth > kMostLevels) throw UsageError(fmt::format("{}nested more than {} levels deep", where, kMostLevels));
    count(where);
    if (node.IsMap()) {
      std::set<std::string> seen;
      for (const auto& item : node) {
        if (!item.first.IsScalar() || item.first.Scalar().empty())
          throw UsageError(fmt::format("{}a key must be a name", at(name, item.first)));
        const std::string inner = key.empty() ? item.first.Scalar() : key + "." + item.first.Scalar();
        const std::string inner_where = at(name, item.first);
        if (!seen.insert(inner).second) throw UsageError(fmt::format("{}'{}' is given twice", inner_where, inner));
        flatten(inner, item.second, name, inner_where, depth + 1);
      }
      return;
    }
    GivenValue given{.key = key, .values = {}, .is_list = node.IsSequence(), .where = where, .file = file_};
    if (!node.IsSequence()) given.values.push_back(node.IsScalar() ? node.Scalar() : "");
    for (const auto& item : node) {
      count(where);
      if (!item.IsScalar()) throw UsageError(fmt::format("{}'{}' must be a list of single values", where, key));
      given.values.push_back(item.Scalar());
    }
    values.push_back(std::move(given));
  }

 private:
  static std::string at(const std::string& name, const YAML::Node& node) {
    return name.empty() ? "" : fmt::format("{}:{}: ", name, node.Mark().line + 1);
  }

  void count(const std::string& where) {
    if (++count_ > kMostValues) throw UsageError(fmt::format("{}more than {} values in all", where, kMostValues));
  }

  void follow(const YAML::Node& defaults, const std::string& name, const fs::path& folder) {
    const std::string where = at(name, defaults);
    if (!defaults.IsSequence()) throw UsageError(where + "defaults must be a list of files");
    for (const auto& item : defaults) {
      if (!item.IsScalar() || item.Scalar().empty()) throw UsageError(where + "defaults must be a list of files");
      fs::path file = folder / item.Scalar();
      if (!file.has_extension()) file += ".yaml";
      load(file, where.substr(0, where.size() - 2));
    }
  }

  std::vector<fs::path> including_;  ///< The outermost file first.
  int files_ = 0, count_ = 0, file_ = 0;
};

}  // namespace

std::vector<GivenValue> read_option_file(const fs::path& file) {
  Reader reader;
  reader.load(file, "");
  return reader.values;
}

std::vector<GivenValue> read_option_text(const std::string& text, const std::string& name) {
  Reader reader;
  reader.add(text, name, std::nullopt);
  return reader.values;
}

std::vector<GivenValue> read_assignment(const std::string& assignment) {
  const std::size_t equals = assignment.find('=');
  try {
    Reader reader;
    reader.flatten(assignment.substr(0, equals), YAML::Load(assignment.substr(equals + 1)), "", "", 0);
    return reader.values;
  } catch (const YAML::Exception& error) {
    throw UsageError(fmt::format("'{}': the value is not valid YAML: {}", assignment, error.msg));
  }
}

}  // namespace ddpkit::train
