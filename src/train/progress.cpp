#include <ddpkit/train/progress.h>

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "train/console.h"

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

/// Returns "|##### |" with `width` columns between the lines; blocks and their eighths if the terminal has UTF-8.
std::string bar_text(std::int64_t done, std::int64_t total, int width) {
  constexpr const char* kEighths[] = {" ", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const bool is_utf8 = has_utf8();
  const std::int64_t eighths = 8 * width * done / total;
  std::string bar = "|";
  for (std::int64_t column = 0; column < width; ++column) {
    const std::int64_t filled = std::clamp<std::int64_t>(eighths - 8 * column, 0, 8);
    bar += filled == 8 ? (is_utf8 ? "█" : "#") : is_utf8 ? kEighths[filled] : " ";
  }
  return bar + "|";
}

}  // namespace

bool has_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    if (!value || !*value) continue;
    const std::string_view locale = value;  // "en_US.UTF-8" or "C.utf8"
    return locale.find("UTF-8") != locale.npos || locale.find("utf8") != locale.npos;
  }
  return false;
}

ProgressBar::ProgressBar(std::int64_t total, ProgressOptions options)
    : options_(std::move(options)), total_(std::max<std::int64_t>(total, 1)), start_(std::chrono::steady_clock::now()) {
  if (options_.enabled && can_redraw(options_.stream))
    kind_ = Kind::kBar;
  else if (options_.enabled && options_.heartbeat && ::isatty(::fileno(options_.stream)) == 0)
    kind_ = Kind::kLines;
  next_drawing_ = start_ + (kind_ == Kind::kBar ? options_.interval : options_.first_heartbeat);
}

ProgressBar::~ProgressBar() { clear(); }

void ProgressBar::advance(const std::function<std::string()>& note) {
  done_ = std::min(done_ + 1, total_);
  if (kind_ == Kind::kNone) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_drawing_) return;
  next_drawing_ = now + (kind_ == Kind::kBar ? options_.interval : options_.next_heartbeat);
  draw(note ? note() : std::string(), now);
}

void ProgressBar::draw(const std::string& note, std::chrono::steady_clock::time_point now) {
  const double seconds = std::chrono::duration<double>(now - start_).count(), done = static_cast<double>(done_);
  std::string facts =
      fmt::format("{}<{}", time_text(seconds), time_text(seconds / done * (static_cast<double>(total_) - done)));
  if (!options_.unit.empty() && seconds > 0)
    facts += fmt::format(", {:.1f} {}/s", done * options_.items_per_step / seconds, options_.unit);
  if (!note.empty()) facts += ", " + note;
  const std::string before = fmt::format("{}: {:3}%", options_.label, 100 * done_ / total_);
  std::string after = fmt::format(" {}/{} [{}]", done_, total_, facts);
  const bool is_bar = kind_ == Kind::kBar;
  if (is_bar && options_.later_steps > 0)
    after += fmt::format(", run {} left",
                         time_text(seconds / done * (static_cast<double>(total_ + options_.later_steps) - done)));
  // The terminal may have been closed, which must not end the program.
  if (is_bar) {
    const int rest = columns_of(options_.stream) - static_cast<int>(before.size() + after.size()) - 3;
    std::fputs(
        fmt::format("{}{}{}{}", kClearLine, before, bar_text(done_, total_, std::clamp(rest, 0, 40)), after).c_str(),
        options_.stream);
  } else {
    std::fputs(fmt::format("{}{}\n", before, after).c_str(), options_.stream);
  }
  std::fflush(options_.stream);
  drawn_ = is_bar;
}

void ProgressBar::clear() noexcept {
  if (!drawn_) return;
  std::fputs(kClearLine, options_.stream);
  std::fflush(options_.stream);
  drawn_ = false;
}

}  // namespace ddpkit::train
