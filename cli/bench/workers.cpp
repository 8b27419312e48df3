#include "workers.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <iostream>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace ddpkit::bench {

int run_with_workers(const std::function<int()>& benchmark) try {
  return benchmark();
} catch (const WorkerFailed& error) {
  std::cerr << std::string("ddpkit bench: ") + error.what() + "\n";
  return error.exit_code();
}

Workers::Workers(Options options)
    : options_(std::move(options)),
      pending_(static_cast<std::size_t>(options_.ranks)),
      answers_(static_cast<std::size_t>(options_.ranks)) {
  std::vector<int> read_ends;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    int ends[2];
    if (::pipe(ends) != 0) {
      close_pipes();
      throw Error(fmt::format("no pipe: {}", std::strerror(errno)));
    }
    // Only this process holds the write end, so the ranks detect its end.
    ::fcntl(ends[1], F_SETFD, FD_CLOEXEC);
    pipes_.push_back({ends[0], ends[1]});
    read_ends.push_back(ends[0]);
  }
  options_.command.insert(options_.command.end(), {"--control", fmt::format("{}", fmt::join(read_ends, ","))});
  // The kernel kills the ranks when the thread that started them ends, so this thread lives as long as the ranks.
  thread_ = std::thread([this] { launch(); });
  try {
    wait_for_answers(0, options_.ranks);
  } catch (...) {
    close_pipes();
    thread_.join();
    throw;
  }
}

Workers::~Workers() {
  close_pipes();
  thread_.join();
}

void Workers::launch() {
  LaunchResult result;
  std::exception_ptr error;
  try {
    result = ddpkit::launch({.command = options_.command,
                             .ranks = options_.ranks,
                             .environment = {{"OMP_NUM_THREADS", "1"}},
                             .on_output = [this](int rank, const std::string& text) { take_output(rank, text); }});
    for (int rank = 0; rank < options_.ranks; ++rank) take_output(rank, "\n");
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  result_ = std::move(result);
  launch_error_ = error;
  ended_ = true;
  changed_.notify_all();
}

void Workers::take_output(int rank, const std::string& text) {
  std::string& lines = pending_[static_cast<std::size_t>(rank)];
  lines += text;
  for (std::size_t end; (end = lines.find('\n')) != std::string::npos; lines.erase(0, end + 1))
    take_line(rank, lines.substr(0, end));
}

void Workers::take_line(int rank, const std::string& line) {
  const std::lock_guard lock(mutex_);
  if (line.starts_with(options_.no_backend_prefix)) {
    no_backend_ = line.substr(options_.no_backend_prefix.size());
  } else if (line.starts_with(options_.answer_prefix)) {
    answers_[static_cast<std::size_t>(rank)].push_back(line);
    changed_.notify_all();
  } else if (!line.empty()) {
    std::cerr << fmt::format("[{} rank {}] {}\n", options_.system, rank, line);
  }
}

std::vector<std::string> Workers::ask(const std::string& question, int first, int count) {
  const std::string line = question + '\n';
  for (int rank = first; rank < first + count; ++rank) {
    // The read end stays open here, so a write to an ended rank raises no SIGPIPE. A pipe accepts a line in one write.
    const int fd = pipes_[static_cast<std::size_t>(rank)].write_end;
    if (::write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
      throw Error(fmt::format("cannot ask rank {} of {}: {}", rank, options_.system, std::strerror(errno)));
  }
  return wait_for_answers(first, count);
}

std::vector<std::string> Workers::wait_for_answers(int first, int count) {
  std::unique_lock lock(mutex_);
  std::vector<std::string> lines;
  for (int rank = first; rank < first + count; ++rank) {
    std::deque<std::string>& answers = answers_[static_cast<std::size_t>(rank)];
    changed_.wait(lock, [&] { return !answers.empty() || ended_; });
    if (answers.empty()) throw_ended();
    lines.push_back(std::move(answers.front()));
    answers.pop_front();
  }
  return lines;
}

void Workers::throw_ended() {
  if (launch_error_) std::rethrow_exception(launch_error_);
  if (!no_backend_.empty()) throw NoBackend(no_backend_);
  if (!result_.first_failure) throw WorkerFailed(fmt::format("{}: the ranks ended too early", options_.system), 1);
  throw WorkerFailed(
      fmt::format("{}: rank {} {}", options_.system, result_.first_failure->rank, result_.first_failure->describe()),
      result_.exit_code());
}

void Workers::close_pipes() noexcept {
  for (const Pipe& pipe : pipes_) {
    ::close(pipe.read_end);
    ::close(pipe.write_end);
  }
  pipes_.clear();
}

Questions::Questions(const std::string& control, int rank) : fd_(-1) {
  const char* begin = control.data();
  const char* const end = begin + control.size();
  for (int i = 0; i <= rank && begin < end; ++i) {
    const auto [stop, status] = std::from_chars(begin, end, fd_);
    if (status != std::errc{}) break;
    begin = stop + 1;
    if (i == rank) return;
  }
  throw InvalidArgument(fmt::format("--control {} has no pipe for rank {}", control, rank));
}

bool Questions::next(std::string& question) {
  for (;;) {
    if (const std::size_t end = pending_.find('\n'); end != std::string::npos) {
      question = pending_.substr(0, end);
      pending_.erase(0, end + 1);
      return true;
    }
    char buffer[256];
    const ssize_t got = ::read(fd_, buffer, sizeof buffer);
    if (got > 0)
      pending_.append(buffer, static_cast<std::size_t>(got));
    else if (got == 0 || errno != EINTR)
      return false;
  }
}

}  // namespace ddpkit::bench
