// Tier 0: the standard library only.
#pragma once

#include <charconv>
#include <string_view>
#include <system_error>

namespace ddpkit {

/// Parses a number. Returns true and sets `number` if the whole text is a number that fits: the format of
/// std::from_chars() in the C locale, without surrounding characters and without '+'. Floating-point types also accept
/// "inf" and "nan".
template <typename Number>
bool parse_number(std::string_view text, Number& number) {
  const auto [stop, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  return status == std::errc{} && stop == text.data() + text.size();
}

}  // namespace ddpkit
