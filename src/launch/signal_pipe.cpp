#include "launch/signal_pipe.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iterator>

#include <fmt/format.h>

#include <ddpkit/error.h>

namespace ddpkit::launcher {
namespace {

constexpr int kNoted[] = {SIGINT, SIGTERM, SIGUSR1, SIGHUP};

volatile sig_atomic_t pipe_to_write = -1;

void note(int number) {
  const int error_before = errno;
  const auto byte = static_cast<unsigned char>(number);
  [[maybe_unused]] const auto written = ::write(pipe_to_write, &byte, 1);
  errno = error_before;
}

}  // namespace

SignalPipe::SignalPipe(bool active) : active_(active) {
  if (!active_) return;
  if (::pipe2(pipe_, O_CLOEXEC | O_NONBLOCK) != 0) throw Error(fmt::format("no pipe: {}", std::strerror(errno)));
  pipe_to_write = pipe_[1];
  struct sigaction action {};
  action.sa_handler = note;
  for (std::size_t i = 0; i < std::size(kNoted); ++i) {
    ::sigaction(kNoted[i], nullptr, &before_[i]);
    if (kNoted[i] != SIGHUP || before_[i].sa_handler != SIG_IGN) ::sigaction(kNoted[i], &action, nullptr);
  }
}

SignalPipe::~SignalPipe() {
  if (!active_) return;
  for (std::size_t i = 0; i < std::size(kNoted); ++i) ::sigaction(kNoted[i], &before_[i], nullptr);
  ::close(pipe_[0]);
  ::close(pipe_[1]);
}

int SignalPipe::take() noexcept {
  unsigned char byte = 0;
  return active_ && ::read(pipe_[0], &byte, 1) == 1 ? byte : 0;
}

}  // namespace ddpkit::launcher
