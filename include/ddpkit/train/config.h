// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace ddpkit::train {

/// Range of a number, including both ends.
struct ConfigRange {
  std::optional<double> least = std::nullopt;  ///< Empty: no lower limit.
  std::optional<double> most = std::nullopt;   ///< Empty: no upper limit.
};

/// A program's configuration: YAML files composed by `defaults:`, then KEY=VALUE overrides. Sections become dotted keys
/// ("training.lr"). read() makes a key known. A key that was never read is an error.
///
///     Config config = Config::load("configs/tiny.yaml");
///     config.override_with("training.lr=2e-3");
///     config.read("training.lr", options.lr, {.least = 0});
///     config.check_all_known();
///
/// `defaults: [base_config, distributed]` in a file names files beside it (".yaml" may be omitted). They are merged in
/// that order before the file's keys. All errors are UsageErrors that give FILE:LINE, or "the command line".
class Config {
 public:
  using Range = ConfigRange;  ///< Short name for calls.

  /// Throws if a file is missing, is not YAML, has a duplicate key, includes itself, or is too large or deep (64
  /// levels, 1 MiB, 10,000 values; an alias counts at each use).
  static Config load(const std::filesystem::path& file);
  /// Parses text, without `defaults:`. Error messages use `name` as the file name. JSON is valid YAML.
  static Config parse(const std::string& text, const std::string& name);

  /// Sets KEY=VALUE, with the value as YAML: "data.include=[digits/, letters/]". Overrides earlier values.
  void override_with(const std::string& assignment);
  /// Sets one value without parsing it.
  void set(const std::string& key, const std::string& value, const std::string& where = "the command line");

  /// Reads a key and makes it known. `value` does not change if the key is not set. Throws for a value of another type,
  /// outside `range`, or not among `choices`. A single value is a list of one.
  /// @{
  void read(const std::string& key, bool& value);
  void read(const std::string& key, int& value, const Range& range = {});
  void read(const std::string& key, std::int64_t& value, const Range& range = {});
  void read(const std::string& key, std::uint64_t& value);
  void read(const std::string& key, double& value, const Range& range = {});
  void read(const std::string& key, std::string& value, const std::vector<std::string>& choices = {});
  void read(const std::string& key, std::vector<std::string>& value);
  void read(const std::string& key, std::vector<std::int64_t>& value, const Range& range = {});
  void read(const std::string& key, std::optional<std::int64_t>& value, const Range& range = {});
  /// @}

  /// Throws for the first key that was never read. The error suggests the most similar known key.
  void check_all_known() const;

  /// Returns where a key was set: "configs/tiny.yaml:12"; the key if it was not set.
  std::string where(const std::string& key) const;

  /// Returns all keys read so far and their values, as a flat JSON object: {"training.lr": 0.002, ...}. parse() accepts
  /// it.
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
  std::map<std::string, std::string> known_;  ///< Values of the keys read, as JSON.
};

}  // namespace ddpkit::train
