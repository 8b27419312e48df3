// Tier 0 and CLI11.
#pragma once

#include <CLI/CLI.hpp>
#include <array>
#include <cstddef>
#include <string>
#include <utility>

namespace ddpkit::train {

/// The values of an enum and their names in the command line. [value]
template <class E, std::size_t N>
using Choices = std::array<std::pair<const char*, E>, N>;

/// Returns the name of `value`; "?" if there is none.
template <class E, std::size_t N>
const char* name_in(const Choices<E, N>& choices, E value) {
  for (const auto& [name, there] : choices) {
    if (there == value) return name;
  }
  return "?";
}

/// Adds an option that takes one of these names, with `value` as the default. `choices` must outlive the parse.
template <class E, std::size_t N>
CLI::Option* add_choice(CLI::App& app, const std::string& option, E& value, const Choices<E, N>& choices,
                        const std::string& description) {
  const auto to_number = [&choices](std::string& text) {
    std::string all;
    for (const auto& [name, there] : choices) {
      if (text == name) {
        text = std::to_string(static_cast<int>(there));
        return std::string();
      }
      all += (all.empty() ? "" : ", ") + std::string(name);
    }
    return "must be one of " + all + ", not " + text;
  };
  return app.add_option(option, value, description)
      ->transform(CLI::Validator(to_number, ""))
      ->type_name("NAME")
      ->default_str(name_in(choices, value));
}

}  // namespace ddpkit::train
