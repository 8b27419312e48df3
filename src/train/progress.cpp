#include <ddpkit/train/progress.h>

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace ddpkit::train {
namespace {

constexpr const char* kClearLine = "\r\033[K";

bool can_redraw(std::FILE* stream) {
  const char* terminal = std::getenv("TERM");
  return ::isatty(::fileno(stream)) != 0 && terminal && std::string_view(terminal) != "dumb";
}

int columns_of(std::FILE* stream) {
  winsize size{};
  return ::ioctl(::fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

ProgressBar::ProgressBar(std::int64_t total, ProgressOptions options)
    : options_(std::move(options)),
      total_(std::max<std::int64_t>(total, 1)),
      visible_(options_.enabled && can_redraw(options_.stream)),
      next_drawing_(std::chrono::steady_clock::now() + options_.interval) {}

ProgressBar::~ProgressBar() { clear(); }

void ProgressBar::advance(const std::function<std::string()>& note) {
  done_ = std::min(done_ + 1, total_);
  if (!visible_) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_drawing_) return;
  next_drawing_ = now + options_.interval;
  draw(note ? note() : std::string());
}

void ProgressBar::draw(const std::string& note) {
  const std::string counts = fmt::format("{}/{}", done_, total_);
  const int others = static_cast<int>(options_.label.size() + counts.size() + note.size()) + 6;
  const int width = std::clamp(columns_of(options_.stream) - others, 0, 40);
  const int filled = static_cast<int>(width * done_ / total_);
  std::string bar(static_cast<std::size_t>(filled), '=');
  if (filled < width) bar += '>';
  bar.resize(static_cast<std::size_t>(width), ' ');
  // The terminal may have been closed, which must not end the program.
  std::fputs(fmt::format("{}{} [{}] {} {}", kClearLine, options_.label, bar, counts, note).c_str(), options_.stream);
  std::fflush(options_.stream);
  drawn_ = true;
}

void ProgressBar::clear() noexcept {
  if (!drawn_) return;
  std::fputs(kClearLine, options_.stream);
  std::fflush(options_.stream);
  drawn_ = false;
}

}  // namespace ddpkit::train
