#include <ddpkit/train/text.h>

#include <cstdio>

#include <fmt/format.h>

namespace ddpkit::train {

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kLongest = 40;
  std::string result = "'";
  for (const char c : text.substr(0, kLongest)) result += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  return result + (text.size() > kLongest ? "...'" : "'");
}

void print_line(const std::string& line) {
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

}  // namespace ddpkit::train
