// Tier 0: the standard library only.
#pragma once

#include <signal.h>

namespace ddpkit::launcher {

/// Records SIGINT, SIGTERM, SIGUSR1 and, unless it is ignored (nohup), SIGHUP, instead of their default action. At most
/// one object per process.
class SignalPipe {
 public:
  /// Does nothing unless `active`.
  explicit SignalPipe(bool active);
  ~SignalPipe();
  SignalPipe(const SignalPipe&) = delete;
  SignalPipe& operator=(const SignalPipe&) = delete;

  /// Readable if a signal is recorded; -1 if not active.
  int descriptor() const noexcept { return pipe_[0]; }
  /// Returns and removes the oldest signal; 0 if none.
  int take() noexcept;

 private:
  bool active_;
  int pipe_[2] = {-1, -1};
  struct sigaction before_[4]{};
};

}  // namespace ddpkit::launcher
