// Tier 0 and nlohmann-json. The inside of Options.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include <ddpkit/train/options.h>

#include "train/options_files.h"

namespace ddpkit::train {

struct Options::Entry {
  std::string section, name, help;
  std::string key;  ///< The shortest that is unique, with underscores.
  std::vector<std::string> other_names = {};
  /// Sets the variable. Returns what the value must be; empty if it is valid.
  std::function<std::string(const std::vector<std::string>&)> set;
  std::function<nlohmann::json()> get;
  bool is_flag = false, is_list = false, is_number = false, is_whole = false;
  double least = -HUGE_VAL, most = HUGE_VAL;
  bool is_above = false;  ///< `least` itself is not valid.
  std::vector<std::string> choices = {};
  bool is_positional = false, is_rest = false, is_required = false, is_hidden = false, differs = false;
  bool is_config = false;  ///< --config itself.
  std::vector<std::string> needed = {}, excluded = {};

  enum class Source { kCode, kFile, kArgument, kFlag };
  Source source = Source::kCode;
  std::string where = {};  ///< Source and name as written: "run.yaml:3: training.lr" or "--lr".
  GivenValue given = {};
  nlohmann::json before = nullptr;  ///< The value of kCode.

  bool is_argument() const { return is_positional || is_rest; }
  bool is_stored() const { return !is_hidden && !is_argument() && !is_config; }
  bool is_given() const { return source != Source::kCode; }
};

/// Ends the parse when the arguments ask for help.
struct HelpRequest {
  std::string text;
};

struct Options::State {
  std::string program, description, epilog, section;
  std::vector<std::unique_ptr<Entry>> entries = {};
  std::map<std::string, Entry*> keys = {};  ///< All names, with underscores.
  std::vector<std::pair<std::string, std::unique_ptr<Options>>> commands = {};
  State* parent = nullptr;  ///< Of the program whose options apply too.
  bool is_chosen = false;
  std::string config = {};  ///< The file of --config.

  /// Returns the option of a name or a full key, or null.
  Entry* find(const std::string& name) const;
  /// Also finds a key with other sections.
  Entry* find_key(const std::string& key) const;
  Entry& known(const std::string& name) const;
  /// Reads the arguments. Returns this and the options of the chosen commands.
  std::vector<State*> take(const std::vector<std::string>& arguments);
  void give_all(const std::vector<GivenValue>& values, Entry::Source source) const;
  /// Sets the variables of all options that were given. With `requires_all`, required options must be given.
  void apply(bool requires_all) const;
  std::string help() const;

 private:
  /// Takes the flag at `i`, and moves `i` to its value if the value is the next argument.
  void take_flag(const std::vector<std::string>& arguments, std::size_t& i) const;
  /// Takes an argument that is no flag and no command. Returns true for an option with rest().
  bool take_argument(const std::vector<std::string>& arguments, std::size_t i, bool is_value) const;
  Entry* positional() const;
  [[noreturn]] void refuse_unknown(const std::string& where, const std::string& name, bool is_flag) const;
};

/// Options have dashes, keys underscores.
std::string underscored(std::string name);
std::string dashed(std::string name);

}  // namespace ddpkit::train
