// Tier 0: the standard library only.
#pragma once

namespace ddpkit::launch {

/// A free TCP port of this host that nobody else is given while this lives: the socket is bound and never listens, so
/// that rank 0, which like every server of c10d sets SO_REUSEADDR, can listen there, and nobody who asks for any port
/// gets it.
class ReservedPort {
 public:
  /// Throws Error when there is none.
  ReservedPort();
  ~ReservedPort();
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;

  int number() const noexcept { return number_; }

 private:
  int fd_ = -1;
  int number_ = 0;
};

}  // namespace ddpkit::launch
