// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace ddpkit::train {

/// What a number may be; both ends are included.
struct ConfigRange {
  std::optional<double> least = std::nullopt;
  std::optional<double> most = std::nullopt;
};

/// A program's configuration: YAML files composed by `defaults:`, then KEY=VALUE overrides. Sections become dotted keys
/// ("training.lr"). Reading a key is what makes it known: a key that nobody has read is an error.
///
///     Config config = Config::load("configs/tiny.yaml");
///     config.override_with("training.lr=2e-3");
///     config.read("training.lr", options.lr, {.least = 0});
///     config.check_all_known();
///
/// A file's `defaults: [base_config, distributed]` names files beside it (".yaml" may be left out), which are merged in
/// that order before the file's own keys. All errors are UsageErrors that say FILE:LINE, or "the command line".
class Config {
 public:
  using Range = ConfigRange;

  /// Throws where a file is missing, is no YAML, gives a key twice, includes itself, or is far too large or deep
  /// (64 levels, 1 MiB, 10,000 values: aliases count as often as they are used).
  static Config load(const std::filesystem::path& file);
  /// From memory, without `defaults:`; `name` stands for the file. JSON is YAML.
  static Config parse(const std::string& text, const std::string& name);

  /// KEY=VALUE, the value as YAML: "data.include=[digits/, letters/]". Wins over what is there.
  void override_with(const std::string& assignment);
  /// One value as it is, without a look at its syntax.
  void set(const std::string& key, const std::string& value, const std::string& where = "the command line");

  /// Each leaves `value` as it is where the key is not given, and makes the key known.
  void read(const std::string& key, bool& value);
  void read(const std::string& key, int& value, const Range& range = {});
  void read(const std::string& key, std::int64_t& value, const Range& range = {});
  void read(const std::string& key, std::uint64_t& value);
  void read(const std::string& key, double& value, const Range& range = {});
  /// With `choices`: one of them.
  void read(const std::string& key, std::string& value, const std::vector<std::string>& choices = {});
  /// A single value is a list of one.
  void read(const std::string& key, std::vector<std::string>& value);
  void read(const std::string& key, std::vector<std::int64_t>& value, const Range& range = {});
  void read(const std::string& key, std::optional<std::int64_t>& value, const Range& range = {});

  /// Throws for the first key that no read() has asked for, with the nearest of those that were.
  void check_all_known() const;

  /// Where a key was given: "configs/tiny.yaml:12"; the key itself where it was not.
  std::string where(const std::string& key) const;

  /// All keys read so far with the values they came out with, as a flat JSON object: {"training.lr": 0.002, ...}.
  /// parse() takes it back.
  std::string resolved() const;

 private:
  struct Entry {
    std::vector<std::string> values;
    bool is_list = false;
    std::string where;
  };
  struct Loader;

  const Entry* find(const std::string& key) const;
  const std::string& scalar(const std::string& key, const Entry& entry) const;
  [[noreturn]] void refuse(const std::string& key, const Entry& entry, const std::string& wanted) const;

  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> known_;  ///< Of each key read, its value as JSON.
};

}  // namespace ddpkit::train
