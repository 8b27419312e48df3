// Tier 0: the standard library only.
#pragma once

#include <charconv>
#include <string_view>
#include <system_error>

namespace ddpkit {

/// Whether the whole text is a number that fits into `number`, which is then set: digits as std::from_chars() takes
/// them in the C locale, nothing before or behind them, no '+'. Of a floating-point `Number` also "inf" and "nan".
template <typename Number>
bool parse_number(std::string_view text, Number& number) {
  const auto [stop, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  return status == std::errc{} && stop == text.data() + text.size();
}

}  // namespace ddpkit
