#include "launch/rank_output.h"

#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <system_error>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>

namespace ddpkit::launcher {
namespace {

constexpr std::size_t kLastLines = 12;
constexpr std::size_t kLongestLine = 500;
/// Interval for checking everything else while the reader of this process's output blocks.
constexpr std::chrono::milliseconds kLookWhileStalled(20);

bool same_file(int a, int b) {
  struct stat first {
  }, second{};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino && first.st_rdev == second.st_rdev;
}

/// Returns the last attempt with a folder of a rank from `first` on, plus one; at least `least`. Ranks of other hosts
/// may already have created folders for this attempt.
int free_attempt(const std::filesystem::path& logs, int least, int first, int ranks) {
  constexpr std::string_view kPrefix = "attempt_";
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(logs, error)) {
    const std::string name = entry.path().filename();
    int attempt = 0;
    if (!name.starts_with(kPrefix) || !parse_number(std::string_view(name).substr(kPrefix.size()), attempt) ||
        attempt < least || attempt == std::numeric_limits<int>::max())
      continue;
    for (int rank = first; rank < first + ranks; ++rank) {
      std::error_code none;
      if (std::filesystem::exists(entry.path() / std::to_string(rank), none)) least = std::max(least, attempt + 1);
    }
  }
  return least;
}

/// Opens a pseudo-terminal that passes every byte unchanged and has the width of the launcher's. Returns false if none
/// is available.
bool open_terminal(int ends[2]) {
  ends[0] = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (ends[0] < 0) return false;
  char name[128];
  if (::grantpt(ends[0]) == 0 && ::unlockpt(ends[0]) == 0 && ::ptsname_r(ends[0], name, sizeof name) == 0) {
    ends[1] = ::open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (ends[1] >= 0) {
      termios raw{};
      winsize size{};
      if (::tcgetattr(ends[1], &raw) == 0) {
        ::cfmakeraw(&raw);
        ::tcsetattr(ends[1], TCSANOW, &raw);
      }
      if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0) ::ioctl(ends[1], TIOCSWINSZ, &size);
      return true;
    }
  }
  ::close(ends[0]);
  return false;
}

}  // namespace

RankOutput::RankOutput(const LaunchOptions& options, std::function<bool()> keeps_waiting)
    : options_(options),
      keeps_waiting_(std::move(keeps_waiting)),
      last_lines_(static_cast<std::size_t>(options.ranks)) {
  if (!options.log_dir.empty())
    attempt_ = free_attempt(options.log_dir, options.restart_count, rank_in_job(0), options.ranks);
}

RankOutput::~RankOutput() {
  for (const Stream& stream : streams_) {
    ::close(stream.fd);
    if (stream.file >= 0) ::close(stream.file);
  }
}

std::filesystem::path RankOutput::folder(int rank) const {
  if (options_.log_dir.empty()) return {};
  return std::filesystem::path(options_.log_dir) / fmt::format("attempt_{}", attempt_) /
         std::to_string(rank_in_job(rank));
}

int RankOutput::open_log(int rank, const char* name, bool replaces) const {
  if (options_.log_dir.empty()) return -1;
  const std::filesystem::path file = folder(rank) / name;
  std::error_code error;
  std::filesystem::create_directories(file.parent_path(), error);
  const int fd =
      error ? -1 : ::open(file.c_str(), O_WRONLY | O_CREAT | (replaces ? O_APPEND : O_EXCL) | O_CLOEXEC, 0644);
  if (fd >= 0) return fd;
  throw InvalidArgument(
      fmt::format("cannot write the log {}: {}", file.string(), error ? error.message() : std::strerror(errno)));
}

void RankOutput::write(int fd, std::string_view text) const {
  while (!text.empty()) {
    pollfd place{fd, POLLOUT, 0};
    const int ready = ::poll(&place, 1, static_cast<int>(kLookWhileStalled.count()));
    if (ready == 0 && !keeps_waiting_()) return;
    if (ready <= 0) continue;
    // A ready pipe accepts at least PIPE_BUF bytes. A longer write would block.
    const auto written = ::write(fd, text.data(), std::min<std::size_t>(text.size(), PIPE_BUF));
    if (written < 0 && errno != EINTR && errno != EAGAIN) return;
    if (written > 0) text.remove_prefix(static_cast<std::size_t>(written));
  }
}

int RankOutput::open_stream(Stream stream, bool through_terminal) {
  int ends[2] = {-1, -1};
  if (!(through_terminal && open_terminal(ends)) && ::pipe2(ends, O_CLOEXEC) != 0)
    throw Error(fmt::format("no pipe: {}", std::strerror(errno)));
  stream.fd = ends[0];
  streams_.push_back(std::move(stream));
  return ends[1];
}

RankOutput::Ends RankOutput::open(int rank, bool replaces) {
  Ends ends;
  const bool to_caller = static_cast<bool>(options_.on_output);
  const bool tees = !options_.log_dir.empty();
  if (to_caller || rank > 0 || replaces) {
    ends.in = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    ends.out = open_stream(
        {.rank = rank, .file = open_log(rank, "stdout.log", replaces), .by_line = !to_caller && options_.show_stdout},
        false);
    ends.err = open_stream({.rank = rank,
                            .is_error = true,
                            .file = open_log(rank, "stderr.log", replaces),
                            .by_line = !to_caller && options_.show_stderr},
                           false);
    return ends;
  }
  // The kernel stops a process outside the terminal's foreground group that reads the terminal. Only a single rank may
  // stay in the foreground group.
  if (::isatty(STDIN_FILENO) != 0) {
    if (options_.ranks == 1) {
      ends.has_terminal = true;
    } else {
      ends.in = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    }
  }
  const bool show_out = options_.show_stdout, show_err = options_.show_stderr;
  const bool one_way = !tees && show_out && show_err && same_file(STDOUT_FILENO, STDERR_FILENO);
  ends.err = open_stream({.rank = 0,
                          .is_error = true,
                          .file = open_log(rank, "stderr.log", replaces),
                          .terminal = show_err ? STDERR_FILENO : -1},
                         show_err && ::isatty(STDERR_FILENO) != 0);
  if (one_way) {
    ends.out = ends.err;
  } else if (tees || !show_out) {
    ends.out = open_stream(
        {.rank = 0, .file = open_log(rank, "stdout.log", replaces), .terminal = show_out ? STDOUT_FILENO : -1},
        show_out && ::isatty(STDOUT_FILENO) != 0);
  }
  return ends;
}

void RankOutput::close_ends(const Ends& ends) {
  if (ends.in >= 0) ::close(ends.in);
  if (ends.out >= 0 && ends.out != ends.err) ::close(ends.out);
  if (ends.err >= 0) ::close(ends.err);
}

void RankOutput::add_to(std::vector<pollfd>& descriptors) const {
  for (const Stream& stream : streams_) descriptors.push_back({stream.fd, POLLIN, 0});
}

void RankOutput::read(const std::vector<pollfd>& descriptors, std::size_t first) {
  for (std::size_t i = streams_.size(); i-- > 0;) {
    if (descriptors[first + i].revents == 0) continue;
    char buffer[16384];
    const auto got = ::read(streams_[i].fd, buffer, sizeof buffer);
    if (got > 0) {
      take(streams_[i], std::string_view(buffer, static_cast<std::size_t>(got)));
    } else if (got == 0 || errno != EINTR) {
      close(i);  // Read returns EIO after the last user has closed a pseudo-terminal.
    }
  }
}

void RankOutput::take(Stream& stream, std::string_view text) {
  if (stream.file >= 0) write(stream.file, text);
  if (stream.is_error) remember(stream.rank, text);
  if (options_.on_output) return options_.on_output(stream.rank, std::string(text));
  if (stream.terminal >= 0) write(stream.terminal, text);
  if (!stream.by_line) return;
  stream.pending += text;
  std::string lines;
  for (std::size_t end; (end = stream.pending.find('\n')) != std::string::npos; stream.pending.erase(0, end + 1))
    lines += fmt::format("[rank {}] {}", rank_in_job(stream.rank), std::string_view(stream.pending).substr(0, end + 1));
  // Both streams go to stderr: stdout belongs to rank 0, whose output may be parsed.
  write(STDERR_FILENO, lines);
}

/// Keeps the last lines as a terminal shows them, without text overwritten after a carriage return.
void RankOutput::remember(int rank, std::string_view text) {
  auto& lines = last_lines_[static_cast<std::size_t>(rank)];
  for (const char c : text) {
    if (lines.empty()) lines.emplace_back();
    if (c == '\n') {
      lines.emplace_back();
      if (lines.size() > kLastLines + 1) lines.pop_front();
      continue;
    }
    std::string& line = lines.back();
    if (line.ends_with('\r')) line.clear();
    if (line.size() < kLongestLine || c == '\r') line += c;
  }
}

std::vector<std::string> RankOutput::last_lines(int rank) const {
  std::vector<std::string> lines;
  for (std::string line : last_lines_[static_cast<std::size_t>(rank)]) {
    // Progress bars clear the line with this sequence.
    for (std::size_t at; (at = line.find("\033[K")) != std::string::npos;) line.erase(at, 3);
    if (line.ends_with('\r')) line.pop_back();
    if (!line.empty()) lines.push_back(std::move(line));
  }
  return lines;
}

void RankOutput::close(std::size_t index) {
  Stream& stream = streams_[index];
  if (!stream.pending.empty())
    write(STDERR_FILENO, fmt::format("[rank {}] {}\n", rank_in_job(stream.rank), stream.pending));
  ::close(stream.fd);
  if (stream.file >= 0) ::close(stream.file);
  streams_.erase(streams_.begin() + static_cast<std::ptrdiff_t>(index));
}

void RankOutput::close_all() {
  while (!streams_.empty()) close(streams_.size() - 1);
}

}  // namespace ddpkit::launcher
