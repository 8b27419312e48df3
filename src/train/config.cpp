#include <ddpkit/train/config.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <yaml-cpp/yaml.h>

#include <ddpkit/parse_number.h>
#include <ddpkit/train/json_text.h>
#include <ddpkit/train/main.h>
#include <ddpkit/train/options.h>

#include "train/config_files.h"

namespace ddpkit::train {
namespace {

constexpr const char* kCommandLine = "the command line";

// Strict: parses the whole text and rejects NaN and infinity.
template <class T>
std::optional<T> to_number(const std::string& text) {
  T value{};
  const std::string_view digits = text;
  if (!parse_number(digits.substr(text.size() > 1 && text[0] == '+' ? 1 : 0), value)) return std::nullopt;
  if constexpr (std::is_floating_point_v<T>) {
    if (!std::isfinite(value)) return std::nullopt;
  }
  return value;
}

template <class T>
bool is_within(T value, const Config::Range& range) {
  const auto number = static_cast<double>(value);
  return (!range.least || number >= *range.least) && (!range.most || number <= *range.most);
}

std::string described(const char* kind, const Config::Range& range) {
  if (range.least && range.most) return fmt::format("{} from {} to {}", kind, *range.least, *range.most);
  if (range.least) return fmt::format("{} of at least {}", kind, *range.least);
  if (range.most) return fmt::format("{} of at most {}", kind, *range.most);
  return kind;
}

constexpr const char* kWhole = "a whole number";

}  // namespace

Config Config::load(const std::filesystem::path& file) {
  Config config;
  Loader{.entries = config.entries_}.load(file, "");
  return config;
}

Config Config::parse(const std::string& text, const std::string& name) {
  Config config;
  Loader{.entries = config.entries_}.add(text, name, std::nullopt);
  return config;
}

void Config::override_with(const std::string& assignment) {
  const std::size_t equals = assignment.find('=');
  const std::string key = assignment.substr(0, equals);
  if (equals == std::string::npos || key.empty())
    throw UsageError(fmt::format("'{}' is no KEY=VALUE such as training.lr=2e-3", assignment));
  std::map<std::string, Entry> given;
  try {
    Loader{.entries = given}.flatten(key, YAML::Load(assignment.substr(equals + 1)), kCommandLine, false, 0, given);
  } catch (const YAML::Exception& error) {
    throw UsageError(fmt::format("'{}': the value is not valid YAML: {}", assignment, error.msg));
  }
  for (auto& [name, entry] : given) entries_[name] = std::move(entry);
}

void Config::set(const std::string& key, const std::string& value, const std::string& where) {
  entries_[key] = {.values = {value}, .is_list = false, .where = where};
}

const Config::Entry* Config::find(const std::string& key) const {
  const auto found = entries_.find(key);
  return found == entries_.end() ? nullptr : &found->second;
}

void Config::refuse(const std::string& key, const Entry& entry, const std::string& wanted) const {
  const std::string given = entry.is_list ? fmt::format("[{}]", fmt::join(entry.values, ", ")) : entry.values.front();
  throw UsageError(fmt::format("{}: {} must be {}, not '{}'", entry.where, key, wanted, given));
}

const std::string& Config::scalar(const std::string& key, const Entry& entry) const {
  if (entry.is_list) refuse(key, entry, "a single value");
  return entry.values.front();
}

void Config::read(const std::string& key, bool& value) {
  if (const Entry* entry = find(key)) {
    const std::string& text = scalar(key, *entry);
    if (text != "true" && text != "false") refuse(key, *entry, "true or false");
    value = text == "true";
  }
  known_[key] = nlohmann::json(value).dump();
}

void Config::read(const std::string& key, int& value, const Range& range) {
  std::int64_t wide = value;
  Range narrow = range;
  narrow.least =
      std::max<double>(range.least.value_or(std::numeric_limits<int>::min()), std::numeric_limits<int>::min());
  narrow.most = std::min<double>(range.most.value_or(std::numeric_limits<int>::max()), std::numeric_limits<int>::max());
  read(key, wide, narrow);
  value = static_cast<int>(wide);
}

void Config::read(const std::string& key, std::int64_t& value, const Range& range) {
  if (const Entry* entry = find(key)) {
    const auto number = to_number<std::int64_t>(scalar(key, *entry));
    if (!number || !is_within(*number, range)) refuse(key, *entry, described(kWhole, range));
    value = *number;
  }
  known_[key] = nlohmann::json(value).dump();
}

void Config::read(const std::string& key, std::uint64_t& value) {
  if (const Entry* entry = find(key)) {
    const auto number = to_number<std::uint64_t>(scalar(key, *entry));
    if (!number) refuse(key, *entry, described(kWhole, {.least = 0}));
    value = *number;
  }
  known_[key] = nlohmann::json(value).dump();
}

void Config::read(const std::string& key, double& value, const Range& range) {
  if (const Entry* entry = find(key)) {
    const auto number = to_number<double>(scalar(key, *entry));
    if (!number || !is_within(*number, range)) refuse(key, *entry, described("a number", range));
    value = *number;
  }
  known_[key] = nlohmann::json(value).dump();
}

void Config::read(const std::string& key, std::string& value, const std::vector<std::string>& choices) {
  if (const Entry* entry = find(key)) {
    const std::string& text = scalar(key, *entry);
    if (!choices.empty() && std::find(choices.begin(), choices.end(), text) == choices.end())
      refuse(key, *entry, fmt::format("one of {}", fmt::join(choices, ", ")));
    value = text;
  }
  known_[key] = json_text(nlohmann::json(value));
}

void Config::read(const std::string& key, std::vector<std::string>& value) {
  if (const Entry* entry = find(key)) value = entry->values;
  known_[key] = json_text(nlohmann::json(value));
}

void Config::read(const std::string& key, std::vector<std::int64_t>& value, const Range& range) {
  if (const Entry* entry = find(key)) {
    value.clear();
    for (const std::string& text : entry->values) {
      const auto number = to_number<std::int64_t>(text);
      if (!number || !is_within(*number, range))
        refuse(key, *entry, fmt::format("a list, each {}", described(kWhole, range)));
      value.push_back(*number);
    }
  }
  known_[key] = nlohmann::json(value).dump();
}

void Config::read(const std::string& key, std::optional<std::int64_t>& value, const Range& range) {
  const Entry* entry = find(key);
  if (!entry) {
    known_[key] = value ? nlohmann::json(*value).dump() : "null";
    return;
  }
  if (!entry->is_list && entry->values.front().empty()) {
    value.reset();
    known_[key] = "null";
    return;
  }
  std::int64_t number = 0;
  read(key, number, range);
  value = number;
}

void Config::check_all_known() const {
  for (const auto& [key, entry] : entries_) {
    if (known_.contains(key)) continue;
    std::vector<std::string> names;
    for (const auto& item : known_) names.push_back(item.first);
    const std::string near = nearest(key, names);
    throw UsageError(fmt::format("{}: unknown key '{}'{}", entry.where, key,
                                 near.empty() ? std::string() : fmt::format("; did you mean {}?", near)));
  }
}

std::string Config::where(const std::string& key) const {
  const Entry* entry = find(key);
  return entry ? entry->where : key;
}

std::string Config::resolved() const {
  nlohmann::json all = nlohmann::json::object();
  for (const auto& [key, value] : known_) all[key] = nlohmann::json::parse(value);
  return all.dump();
}

}  // namespace ddpkit::train
