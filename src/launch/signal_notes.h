// Tier 0: the standard library only.
#pragma once

#include <signal.h>

namespace ddpkit::launch {

/// Notes SIGINT, SIGTERM, SIGUSR1 and, unless it is ignored (nohup), SIGHUP instead of dying of them, while it lives.
/// One at a time in a process.
class SignalNotes {
 public:
  /// Does nothing unless `active`.
  explicit SignalNotes(bool active);
  ~SignalNotes();
  SignalNotes(const SignalNotes&) = delete;
  SignalNotes& operator=(const SignalNotes&) = delete;

  /// Readable when there is a note; -1 when not active.
  int descriptor() const noexcept { return pipe_[0]; }
  /// The oldest note, 0 when there is none.
  int take() noexcept;

 private:
  bool active_;
  int pipe_[2] = {-1, -1};
  struct sigaction before_[4]{};
};

}  // namespace ddpkit::launch
