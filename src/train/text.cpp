#include <ddpkit/train/text.h>

#include <sys/uio.h>
#include <unistd.h>

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

void log_line(const std::string& line) noexcept {
  // One system call, so that the lines of several processes stay whole. fprintf() of glibc 2.41 writes each part.
  const iovec parts[] = {{const_cast<char*>(line.data()), line.size()}, {const_cast<char*>("\n"), 1}};
  [[maybe_unused]] const auto written = ::writev(STDERR_FILENO, parts, 2);
}

}  // namespace ddpkit::train
