#include "train/config_files.h"

#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <ddpkit/train/main.h>

namespace ddpkit::train {
namespace {

constexpr std::size_t kMostBytes = 1 << 20;
constexpr int kMostFiles = 100;

std::string at(const std::string& name, const YAML::Node& node, bool has_lines) {
  return has_lines ? fmt::format("{}:{}", name, node.Mark().line + 1) : name;
}

std::string read_text(const std::filesystem::path& file, const std::string& included_from) {
  const std::string by = included_from.empty() ? "" : fmt::format(", which {} includes", included_from);
  if (!std::filesystem::is_regular_file(file))
    throw UsageError(fmt::format("there is no config file {}{}", file.string(), by));
  std::ifstream input(file, std::ios::binary);
  std::string text(kMostBytes + 1, '\0');
  input.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(input.gcount()));
  if (input.bad() || (!input && !input.eof()))
    throw UsageError(fmt::format("cannot read the config file {}{}", file.string(), by));
  if (text.size() > kMostBytes)
    throw UsageError(fmt::format("{} is larger than 1 MiB: that is no config file", file.string()));
  return text;
}

}  // namespace

void Config::Loader::load(const std::filesystem::path& file, const std::string& included_from) {
  std::error_code error;
  const std::filesystem::path canonical = std::filesystem::weakly_canonical(file, error);
  for (const std::filesystem::path& outer : under_way) {
    if (outer == canonical)
      throw UsageError(fmt::format("{}: {} includes itself by way of its defaults", included_from, file.string()));
  }
  if (++files > kMostFiles) throw UsageError(fmt::format("{}: more than {} files in all", included_from, kMostFiles));
  under_way.push_back(canonical);
  add(read_text(file, included_from), file.string(), file.parent_path());
  under_way.pop_back();
}

void Config::Loader::add(const std::string& text, const std::string& name,
                         const std::optional<std::filesystem::path>& folder) {
  try {
    const YAML::Node root = YAML::Load(text);
    if (root.IsNull()) return;
    if (!root.IsMap()) throw UsageError(fmt::format("{} must hold KEY: VALUE lines", name));
    if (const YAML::Node defaults = root["defaults"]; defaults && folder) follow(defaults, name, *folder);
    std::map<std::string, Entry> own;
    flatten("", root, name, true, 0, own);
    if (folder) own.erase("defaults");
    for (auto& [key, entry] : own) entries[key] = std::move(entry);
  } catch (const YAML::Exception& error) {
    throw UsageError(fmt::format("{}:{}: not valid YAML: {}", name, error.mark.line + 1, error.msg));
  }
}

void Config::Loader::follow(const YAML::Node& defaults, const std::string& name, const std::filesystem::path& folder) {
  const std::string here = at(name, defaults, true);
  if (!defaults.IsSequence()) throw UsageError(fmt::format("{}: defaults must be a list of files", here));
  for (const auto& item : defaults) {
    if (!item.IsScalar() || item.Scalar().empty())
      throw UsageError(fmt::format("{}: defaults must be a list of files", here));
    std::filesystem::path file = folder / item.Scalar();
    if (!file.has_extension()) file += ".yaml";
    load(file, here);
  }
}

void Config::Loader::flatten(const std::string& key, const YAML::Node& node, const std::string& name, bool has_lines,
                             int depth, std::map<std::string, Entry>& into) {
  const std::string here = at(name, node, has_lines);
  if (depth > kMostConfigLevels)
    throw UsageError(fmt::format("{}: nested more than {} levels deep", here, kMostConfigLevels));
  if (++values > kMostConfigValues)
    throw UsageError(fmt::format("{}: more than {} values in all", here, kMostConfigValues));
  if (node.IsMap()) {
    std::set<std::string> seen;
    for (const auto& item : node) {
      if (!item.first.IsScalar() || item.first.Scalar().empty())
        throw UsageError(fmt::format("{}: a key must be a name", here));
      const std::string inner = key.empty() ? item.first.Scalar() : key + "." + item.first.Scalar();
      if (!seen.insert(inner).second)
        throw UsageError(fmt::format("{}: '{}' is given twice", at(name, item.first, has_lines), inner));
      flatten(inner, item.second, name, has_lines, depth + 1, into);
    }
    return;
  }
  Entry entry{.values = {}, .is_list = node.IsSequence(), .where = here};
  if (node.IsSequence()) {
    for (const auto& item : node) {
      if (++values > kMostConfigValues)
        throw UsageError(fmt::format("{}: more than {} values in all", here, kMostConfigValues));
      if (!item.IsScalar()) throw UsageError(fmt::format("{}: '{}' must be a list of single values", here, key));
      entry.values.push_back(item.Scalar());
    }
  } else {
    entry.values.push_back(node.IsScalar() ? node.Scalar() : "");
  }
  if (!into.emplace(key, std::move(entry)).second) throw UsageError(fmt::format("{}: '{}' is given twice", here, key));
}

}  // namespace ddpkit::train
