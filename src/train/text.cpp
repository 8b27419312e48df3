#include <ddpkit/train/text.h>

#include <cstdio>

namespace ddpkit::train {

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kLongest = 40;
  std::string result = "'";
  for (const char c : text.substr(0, kLongest)) result += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  return result + (text.size() > kLongest ? "...'" : "'");
}

void print_line(const std::string& line) {
  const std::string text = line + '\n';
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

void log_line(const std::string& line) noexcept { std::fprintf(stderr, "%s\n", line.c_str()); }

}  // namespace ddpkit::train
