// Tier 0: the standard library only.
#pragma once

namespace ddpkit::launcher {

/// Reserves a free TCP port of this host. The socket is bound and never listens. Rank 0 can listen on the port, because
/// c10d servers set SO_REUSEADDR. The kernel does not assign the port to other processes.
class ReservedPort {
 public:
  /// Throws Error if no port is free.
  ReservedPort();
  ~ReservedPort();
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;

  int number() const noexcept { return number_; }

 private:
  int fd_ = -1;
  int number_ = 0;
};

}  // namespace ddpkit::launcher
