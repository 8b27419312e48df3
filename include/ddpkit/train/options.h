// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <ddpkit/error.h>

namespace ddpkit::train {

/// A wrong option or config file. run_main() then returns exit code 2.
class UsageError : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// The options of a program. One declaration serves the command line, config files, --help, and the description of a
/// run:
///
///     Options options("har", "Classifies windows of motion sensors.");
///     options.section("training");
///     options.add("lr", &lr, "Learning rate").above(0);
///
/// This defines the flags --lr and --training.lr, the config keys lr and training.lr, and the argument
/// training.lr=2e-3. Dashes and underscores in names are equal. A flag has priority over KEY=VALUE, then --config FILE,
/// the files of its `defaults:`, and the value of `lr`. The section of a key may be omitted or be any name.
class Options {
 public:
  /// The variable of an option. It holds the default, and must outlive the parse.
  using Target = std::variant<bool*, int*, std::int64_t*, std::uint64_t*, double*, std::string*, std::optional<int>*,
                              std::optional<std::int64_t>*, std::optional<std::uint64_t>*, std::optional<double>*,
                              std::vector<int>*, std::vector<std::int64_t>*, std::vector<std::string>*>;
  /// Parses the text of a value. Returns the empty string, or what the value must be: "a size in bytes".
  using Parse = std::function<std::string(const std::string& text)>;

  struct Entry;  ///< One option.

  /// Refines an option.
  class Option {
   public:
    /// Of Options::add() and at().
    explicit Option(Options& options, Entry& entry) : options_(options), entry_(entry) {}

    Option& help(const std::string& text);            ///< The line of --help.
    Option& between(double least, double most);       ///< Both ends are allowed.
    Option& at_least(double least);                   ///< From `least`.
    Option& above(double low);                        ///< Greater than `low`.
    Option& one_of(std::vector<std::string> values);  ///< The only valid values, or elements of a list.
    Option& also(const std::string& name);            ///< A second name, or a letter: "-n".
    Option& positional();                             ///< An argument without a flag. A list takes several.
    Option& rest();                                   ///< All arguments from the first that is no option.
    Option& required();                               ///< The program fails without this option.
    Option& needs(const std::string& other);          ///< Has no effect without `other`.
    Option& excludes(const std::string& other);       ///< Contradicts `other`.
    Option& hidden();                                 ///< Not in --help, resolved() and config files.
    Option& may_differ();                             ///< A run resumes although the value has changed.

   private:
    Options& options_;
    Entry& entry_;
  };

  /// `program`: the name in --help and in errors.
  Options(std::string program, std::string description);
  ~Options();
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;

  /// The section of all following options: a group in --help, a map in config files.
  void section(const std::string& name);
  /// Declares an option. A bool defines --NAME and --no-NAME. A list is separated by commas.
  Option add(const std::string& name, Target target, const std::string& help);
  /// An option with its own format. `show` returns the value as text.
  Option add(const std::string& name, Parse parse, std::function<std::string()> show, const std::string& help);
  /// An option that takes one of some names: {{"cnn", Mode::kCnn}, {"lstm", Mode::kLstm}}.
  template <class T>
  Option add(const std::string& name, T* target, const std::vector<std::pair<std::string, T>>& names,
             const std::string& help) {
    const auto show = [target, names] {
      for (const auto& [text, value] : names) {
        if (value == *target) return text;
      }
      return std::string();
    };
    std::vector<std::string> texts;
    for (const auto& item : names) texts.push_back(item.first);
    const auto parse = [target, names](const std::string& text) {
      for (const auto& [known, value] : names) {
        if (known == text) *target = value;
      }
      return std::string();
    };
    return add(name, parse, show, help).one_of(texts);
  }
  /// Returns an option, to refine it.
  Option at(const std::string& name);
  /// Undeclares options that a program does not use.
  void remove(const std::vector<std::string>& names);
  /// Declares a command: `har generate FOLDER`. Returns its own options. With `inherits`, the program's options apply
  /// too.
  Options& command(const std::string& name, const std::string& help, bool inherits = false);
  /// Text below the options in --help.
  void epilog(const std::string& text);

  /// Sets all variables. Returns the text of --help if it is requested, otherwise the empty string. Throws UsageError
  /// with FILE:LINE or the flag, the value, and the nearest known name.
  std::string parse(int argc, const char* const* argv);
  /// Sets the variables from resolved(). `name`: the file name in errors.
  void parse_resolved(const std::string& text, const std::string& name);

  /// Returns the program's name.
  const std::string& program() const noexcept;
  /// True for a command that the arguments of parse() name.
  bool is_chosen() const noexcept;
  /// True if parse() set the option.
  bool is_given(const std::string& name) const;
  /// Returns the value of an option as text.
  std::string text(const std::string& name) const;
  /// Returns all values by their shortest keys: a JSON object, which is also YAML for --config.
  std::string resolved() const;
  /// Returns the keys of resolved() whose options may differ in a resumed run.
  std::vector<std::string> keys_that_may_differ() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Returns the candidate with the smallest edit distance to `word`; empty if none is close enough to be a typing error.
std::string nearest(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace ddpkit::train
