#include <ddpkit/train/options.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <type_traits>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/parse_number.h>
#include <ddpkit/train/json_text.h>
#include <ddpkit/train/text.h>

#include "train/options_state.h"

namespace ddpkit::train {
namespace {

using Entry = Options::Entry;

/// Strict: the whole text, in range, finite.
template <class T>
bool read(const Entry& entry, const std::string& text, T& value) {
  if constexpr (std::is_same_v<T, std::string>) {
    value = text;
    return entry.choices.empty() || std::find(entry.choices.begin(), entry.choices.end(), text) != entry.choices.end();
  } else if constexpr (std::is_same_v<T, bool>) {
    value = text == "true";
    return text == "true" || text == "false";
  } else {
    T number{};
    if (!parse_number(std::string_view(text).substr(text.size() > 1 && text[0] == '+' ? 1 : 0), number)) return false;
    const auto real = static_cast<double>(number);
    if (!std::isfinite(real) || real < entry.least || real > entry.most || (entry.is_above && real == entry.least))
      return false;
    value = number;
    return true;
  }
}

template <class T>
bool read(const Entry& entry, const std::vector<std::string>& texts, T& value) {
  return texts.size() == 1 && read(entry, texts.front(), value);
}

template <class T>
bool read(const Entry& entry, const std::vector<std::string>& texts, std::optional<T>& value) {
  if (texts.size() == 1 && texts.front().empty()) {
    value.reset();
    return true;
  }
  T number{};
  if (!read(entry, texts, number)) return false;
  value = number;
  return true;
}

template <class T>
bool read(const Entry& entry, const std::vector<std::string>& texts, std::vector<T>& values) {
  std::vector<T> all;
  for (const std::string& text : texts) {
    if (!read(entry, text, all.emplace_back())) return false;
  }
  values = std::move(all);
  return true;
}

template <class T>
struct Element {
  using Type = T;
};
template <class T>
struct Element<std::optional<T>> {
  using Type = T;
};
template <class T>
struct Element<std::vector<T>> {
  using Type = T;
};

template <class T>
nlohmann::json to_json(const T& value) {
  return value;
}
template <class T>
nlohmann::json to_json(const std::optional<T>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json();
}

/// Describes valid values: "a whole number from 1 to 256".
std::string requirement(const Entry& entry) {
  std::string text = "a text";
  if (entry.is_flag) text = "true or false";
  if (!entry.choices.empty()) text = fmt::format("one of {}", fmt::join(entry.choices, ", "));
  if (entry.is_number) {
    text = entry.is_whole ? "a whole number" : "a number";
    const bool has_least = entry.least != -HUGE_VAL, has_most = entry.most != HUGE_VAL;
    if (has_least && has_most)
      text += fmt::format(" from {} to {}", entry.least, entry.most);
    else if (has_least)
      text += fmt::format(" {} {}", entry.is_above ? "above" : "of at least", entry.least);
  }
  return entry.is_list ? "a list, each " + text : text;
}

/// "-n, --nproc-per-node N"
std::string usage_of(const Entry& entry) {
  if (entry.is_argument()) return entry.name + (entry.is_list ? "..." : "");
  std::string text;
  for (const std::string& other : entry.other_names) {
    if (other.size() == 1) text += dashed(other) + ", ";
  }
  text += dashed(entry.key);
  if (entry.is_flag && entry.get() == true) text += fmt::format(", --no{}", dashed(entry.key).substr(1));
  for (const std::string& other : entry.other_names) {
    if (other.size() > 1) text += fmt::format(", {}", dashed(other));
  }
  if (entry.is_flag) return text;
  text += entry.is_whole ? " N" : entry.is_number ? " X" : entry.choices.empty() ? " TEXT" : " NAME";
  return entry.is_list ? text + ",..." : text;
}

std::string text_of(const nlohmann::json& value) {
  if (value.is_null() || value == false) return "";
  if (value.is_string()) return value.get<std::string>();
  std::string text = value == true ? "on" : json_text(value);
  if (value.is_array()) std::erase_if(text, [](char c) { return c == '[' || c == ']' || c == '"'; });
  return text;
}

/// Returns no default if it is not a valid value: the option then has no effect.
std::string default_of(const Entry& entry) {
  const nlohmann::json value = entry.get();
  const std::string text = text_of(value);
  double number = 0;
  return text.empty() || (value.is_number() && !read(entry, text, number)) ? "" : fmt::format(" [{}]", text);
}

/// A row of --help: a name, and its description from column 36 on.
std::string help_row(const std::string& name, const std::string& text) {
  constexpr std::size_t kColumn = 34;
  if (name.size() < kColumn - 1) return fmt::format("  {:<{}}{}\n", name, kColumn, text);
  return fmt::format("  {}\n  {:<{}}{}\n", name, "", kColumn, text);
}

}  // namespace

std::string underscored(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

std::string dashed(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return fmt::format("{}{}", name.size() == 1 ? "-" : "--", name);
}

std::string Options::State::help() const {
  std::string text = fmt::format("{}: {}\n\nUsage: {}{} [OPTION | KEY=VALUE]...", program, description, program,
                                 commands.empty() ? "" : " [COMMAND]");
  for (const auto& entry : entries) {
    if (entry->is_argument()) text += fmt::format(" {}", usage_of(*entry));
  }
  text += "\n";
  if (!epilog.empty()) text += fmt::format("\n{}\n", epilog);
  if (!commands.empty()) text += "\nSubcommands:\n";
  for (const auto& [name, command] : commands) text += help_row(name, command->state_->description);
  for (const State* state = this; state; state = state->parent) {
    std::string shown = "?";
    for (const auto& entry : state->entries) {
      if (entry->is_hidden) continue;
      if (entry->section != shown) text += fmt::format("\n{}:\n", entry->section.empty() ? "options" : entry->section);
      shown = entry->section;
      text += help_row(usage_of(*entry), entry->help + default_of(*entry));
    }
  }
  text += '\n';
  return text + help_row("-h, --help", "Print this text");
}

Options::Options(std::string program, std::string description) : state_(new State) {
  state_->program = std::move(program);
  state_->description = std::move(description);
  add("config", &state_->config, "YAML file of these options: KEY: VALUE, in sections or not");
  state_->entries.back()->is_config = true;
}

Options::~Options() = default;

void Options::section(const std::string& name) { state_->section = name; }

Options::Option Options::add(const std::string& name, Target target, const std::string& help) {
  auto owned = std::make_unique<Entry>();
  Entry& entry = *owned;
  entry.section = state_->section;
  entry.name = name;
  entry.help = help;
  std::visit(
      [&entry](auto* value) {
        using T = std::remove_pointer_t<decltype(value)>;
        using E = typename Element<T>::Type;
        entry.is_flag = std::is_same_v<E, bool>;
        entry.is_number = std::is_arithmetic_v<E> && !entry.is_flag;
        entry.is_whole = std::is_integral_v<E> && !entry.is_flag;
        entry.is_list = std::is_same_v<T, std::vector<E>>;
        if (std::is_same_v<E, std::uint64_t>) entry.least = 0;
        if (std::is_same_v<E, int>) entry.most = std::numeric_limits<int>::max();
        entry.set = [&entry, value](const std::vector<std::string>& texts) {
          return read(entry, texts, *value) ? std::string() : requirement(entry);
        };
        entry.get = [value] { return to_json(*value); };
      },
      target);
  state_->entries.push_back(std::move(owned));
  const std::string full_name = entry.section.empty() ? name : entry.section + "." + name;
  // The first option of a name has the short key.
  entry.key = underscored(state_->keys.emplace(underscored(name), &entry).second ? name : full_name);
  state_->keys[underscored(full_name)] = &entry;
  return Option(*this, entry);
}

Options::Option Options::add(const std::string& name, Parse parse, std::function<std::string()> show,
                             const std::string& help) {
  std::string unused;
  const Option option = add(name, &unused, help);
  Entry& entry = *state_->entries.back();
  entry.set = [&entry, parse](const std::vector<std::string>& texts) {
    std::string text;
    return texts.size() == 1 && read(entry, texts.front(), text) ? parse(text) : requirement(entry);
  };
  entry.get = [show] { return nlohmann::json(show()); };
  return option;
}

Options::Option Options::at(const std::string& name) { return Option(*this, state_->known(name)); }

void Options::remove(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const Entry* entry = &state_->known(name);
    std::erase_if(state_->keys, [&](const auto& item) { return item.second == entry; });
    std::erase_if(state_->entries, [&](const auto& item) { return item.get() == entry; });
  }
}

Options& Options::command(const std::string& name, const std::string& help, bool inherits) {
  state_->commands.emplace_back(name, std::make_unique<Options>(state_->program + " " + name, help));
  State& command = *state_->commands.back().second->state_;
  if (inherits) {
    command.parent = state_.get();
    state_->commands.back().second->remove({"config"});
  }
  return *state_->commands.back().second;
}

void Options::epilog(const std::string& text) { state_->epilog = text; }
const std::string& Options::program() const noexcept { return state_->program; }
bool Options::is_chosen() const noexcept { return state_->is_chosen; }
bool Options::is_given(const std::string& name) const { return state_->known(name).is_given(); }

std::string Options::text(const std::string& name) const { return text_of(state_->known(name).get()); }

std::string Options::resolved() const {
  nlohmann::json values = nlohmann::json::object();
  for (const auto& entry : state_->entries) {
    if (entry->is_stored()) values[entry->key] = entry->get();
  }
  return json_text(values);
}

std::vector<std::string> Options::keys_that_may_differ() const {
  std::vector<std::string> keys;
  for (const auto& entry : state_->entries) {
    if (entry->differs) keys.push_back(entry->key);
  }
  return keys;
}

Options::Option& Options::Option::help(const std::string& text) { return entry_.help = text, *this; }
Options::Option& Options::Option::between(double least, double most) {
  return entry_.least = least, entry_.most = most, *this;
}
Options::Option& Options::Option::at_least(double least) { return entry_.least = least, *this; }
Options::Option& Options::Option::above(double low) { return entry_.least = low, entry_.is_above = true, *this; }
Options::Option& Options::Option::one_of(std::vector<std::string> values) {
  return entry_.choices = std::move(values), *this;
}
Options::Option& Options::Option::also(const std::string& name) {
  entry_.other_names.push_back(name);
  options_.state_->keys[underscored(name)] = &entry_;
  return *this;
}
Options::Option& Options::Option::positional() { return entry_.is_positional = true, *this; }
Options::Option& Options::Option::rest() { return entry_.is_rest = true, *this; }
Options::Option& Options::Option::required() { return entry_.is_required = true, *this; }
Options::Option& Options::Option::needs(const std::string& other) { return entry_.needed.push_back(other), *this; }
Options::Option& Options::Option::excludes(const std::string& other) { return entry_.excluded.push_back(other), *this; }
Options::Option& Options::Option::hidden() { return entry_.is_hidden = true, *this; }
Options::Option& Options::Option::may_differ() { return entry_.differs = true, *this; }

}  // namespace ddpkit::train
