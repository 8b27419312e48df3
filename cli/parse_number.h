#pragma once

#include <charconv>
#include <string_view>
#include <system_error>

namespace ddpkit {

/// Whether the whole text is a number that fits into `number`.
template <typename Number>
bool parse_number(std::string_view text, Number& number) {
  const auto [stop, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  return status == std::errc{} && stop == text.data() + text.size();
}

}  // namespace ddpkit
