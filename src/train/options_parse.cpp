#include <algorithm>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/train/text.h>

#include "train/options_state.h"

namespace ddpkit::train {
namespace {

using Entry = Options::Entry;

std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

void give(Entry& entry, Entry::Source source, GivenValue value, const std::string& written) {
  if (source < entry.source) return;
  const bool is_again = source == entry.source;
  const bool adds = is_again && entry.is_list && source == Entry::Source::kFlag;
  if (is_again && !adds &&
      (source == Entry::Source::kFlag || (source == Entry::Source::kFile && value.file == entry.given.file)))
    throw UsageError(fmt::format("{}'{}' is given twice", value.where, written));
  if (entry.is_list && !value.is_list && value.values.size() == 1 && !entry.is_argument())
    value.values = split_at_commas(value.values.front());
  if (adds) value.values.insert(value.values.begin(), entry.given.values.begin(), entry.given.values.end());
  entry.source = source;
  entry.where = value.where + written;
  entry.given = std::move(value);
}

/// The file that a run writes has all options, also those without effect.
bool is_on(const Entry& entry) {
  const nlohmann::json value = entry.get();
  if (entry.source == Entry::Source::kFile && value == entry.before) return false;
  return entry.is_given() && value != false && value != "";
}

}  // namespace

Options::Entry* Options::State::find(const std::string& name) const {
  const auto found = keys.find(underscored(name));
  if (found != keys.end()) return found->second;
  return parent ? parent->find(name) : nullptr;
}

Options::Entry* Options::State::find_key(const std::string& key) const {
  for (std::size_t begin = 0;; ++begin) {
    if (Entry* entry = find(key.substr(begin)); entry && entry->is_stored()) return entry;
    begin = key.find('.', begin);
    if (begin == std::string::npos) return nullptr;
  }
}

Options::Entry& Options::State::known(const std::string& name) const {
  if (Entry* entry = find(name)) return *entry;
  throw Error(fmt::format("the program {} has no option {}", program, name));
}

Options::Entry* Options::State::positional() const {
  for (const auto& entry : entries) {
    if (entry->is_rest || (entry->is_positional && (entry->is_list || !entry->is_given()))) return entry.get();
  }
  return nullptr;
}

void Options::State::refuse_unknown(const std::string& where, const std::string& name, bool is_flag) const {
  std::vector<std::string> names;
  for (const State* state = this; state; state = state->parent) {
    for (const auto& [key, entry] : state->keys) {
      if (key.size() > 1 && (entry->is_stored() || (is_flag && entry->is_config)))
        names.push_back(is_flag ? dashed(key).substr(2) : key);
    }
  }
  const std::string near = nearest(is_flag ? dashed(name).substr(2) : underscored(name), names);
  throw UsageError(fmt::format("{}unknown option {}{}", where, is_flag ? "--" + name : "'" + name + "'",
                               near.empty() ? "" : fmt::format("; did you mean {}{}?", is_flag ? "--" : "", near)));
}

void Options::State::give_all(const std::vector<GivenValue>& values, Entry::Source source) const {
  for (const GivenValue& value : values) {
    Entry* entry = find_key(value.key);
    if (!entry) refuse_unknown(value.where, value.key, false);
    give(*entry, source, value, value.key);
  }
}

void Options::State::apply(bool requires_all) const {
  for (const auto& entry : entries) {
    if (!entry->is_given()) {
      if (entry->is_required && requires_all)
        throw UsageError(fmt::format("{} is required", entry->is_argument() ? entry->name : dashed(entry->key)));
      continue;
    }
    if (entry->before.is_null()) entry->before = entry->get();
    const bool is_list_for_one = entry->given.is_list && !entry->is_list;
    const std::string must_be = is_list_for_one ? "a single value" : entry->set(entry->given.values);
    if (must_be.empty()) continue;
    const std::string value = fmt::format("{}", fmt::join(entry->given.values, ", "));
    throw UsageError(fmt::format("{} must be {}, not {}", entry->where, must_be,
                                 in_quotes(entry->given.is_list ? fmt::format("[{}]", value) : value)));
  }
  for (const auto& entry : entries) {
    if (!is_on(*entry)) continue;
    for (const std::string& other : entry->needed) {
      if (!is_on(known(other))) throw UsageError(fmt::format("{} needs {}", entry->where, dashed(other)));
    }
    for (const std::string& other : entry->excluded) {
      if (is_on(known(other))) throw UsageError(fmt::format("{} excludes {}", entry->where, known(other).where));
    }
  }
}

std::vector<Options::State*> Options::State::take(const std::vector<std::string>& arguments) {
  std::vector<State*> path = {this};
  bool are_values = false;  // After "--".
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    State& now = *path.back();
    const auto command = std::find_if(now.commands.begin(), now.commands.end(),
                                      [&](const auto& known) { return known.first == argument; });
    if (!are_values && argument == "--") {
      are_values = true;
    } else if (!are_values && (argument == "--help" || argument == "-h")) {
      throw HelpRequest{now.help()};
    } else if (!are_values && argument.size() > 1 && argument[0] == '-') {
      now.take_flag(arguments, i);
    } else if (!are_values && command != now.commands.end()) {
      path.push_back(command->second->state_.get());
      path.back()->is_chosen = true;
    } else if (now.take_argument(arguments, i, are_values)) {
      break;
    }
  }
  return path;
}

bool Options::State::take_argument(const std::vector<std::string>& arguments, std::size_t i, bool is_value) const {
  const std::string& argument = arguments[i];
  Entry* entry = positional();
  const std::size_t equals = argument.find('=');
  const bool has_key = !is_value && equals != std::string::npos && equals > 0;
  if (has_key && (!entry || (!entry->is_rest && find_key(argument.substr(0, equals))))) {
    give_all(read_assignment(argument), Entry::Source::kArgument);
    return false;
  }
  if (entry) {
    GivenValue value{.values = {argument}};
    if (entry->is_rest) value.values.assign(arguments.begin() + static_cast<std::ptrdiff_t>(i), arguments.end());
    give(*entry, Entry::Source::kFlag, std::move(value), entry->name);
    return entry->is_rest;
  }
  std::string names;
  for (const auto& known : commands) names += (names.empty() ? "" : ", ") + known.first;
  throw UsageError(
      fmt::format("unexpected argument {}{}", in_quotes(argument), names.empty() ? "" : "; the commands are " + names));
}

void Options::State::take_flag(const std::vector<std::string>& arguments, std::size_t& i) const {
  const std::string& argument = arguments[i];
  const bool is_long = argument.starts_with("--");
  const std::size_t equals = is_long ? argument.find('=') : std::string::npos;
  const std::string name = is_long ? argument.substr(2, equals - 2) : argument.substr(1, 1);
  Entry* entry = name.size() == 1 && is_long ? nullptr : find(name);
  std::optional<std::string> value;
  if (equals != std::string::npos) value = argument.substr(equals + 1);
  if (!is_long && argument.size() > 2) value = argument.substr(argument[2] == '=' ? 3 : 2);
  const std::string written = is_long ? "--" + name : "-" + name;
  if (!entry && is_long && underscored(name).starts_with("no_") && !value) {
    entry = find(name.substr(3));
    if (entry && entry->is_flag) value = "false";
  }
  if (!entry || entry->is_argument() || (entry->is_flag && value && !is_long)) {
    if (is_long) refuse_unknown("", name, true);
    throw UsageError("unknown option " + argument);
  }
  if (!value && entry->is_flag) value = "true";
  if (!value) {
    if (i + 1 == arguments.size() || arguments[i + 1].starts_with("--"))
      throw UsageError(fmt::format("{} needs a value", written));
    value = arguments[++i];
  }
  give(*entry, Entry::Source::kFlag, {.values = {*value}}, written);
}

std::string Options::parse(int argc, const char* const* argv) try {
  const std::vector<State*> path = state_->take({argv + 1, argv + argc});
  State& last = *path.back();
  for (const auto& entry : (last.parent ? last.parent : &last)->entries) {
    if (entry->is_config && entry->is_given())
      last.give_all(read_option_file(entry->given.values.front()), Entry::Source::kFile);
  }
  for (const State* state : path) state->apply(state == &last || state == last.parent);
  return {};
} catch (const HelpRequest& request) {
  return request.text;
}

void Options::parse_resolved(const std::string& text, const std::string& name) {
  state_->give_all(read_option_text(text, name), Entry::Source::kFile);
  state_->apply(false);
}

std::string nearest(const std::string& word, const std::vector<std::string>& candidates) {
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(2, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) best_distance = distance, best = candidate;
  }
  return best;
}

}  // namespace ddpkit::train
