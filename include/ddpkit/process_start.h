// Tier 0: the standard library only.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

namespace ddpkit {

/// The first thing in a program's main function. Opens /dev/null for those of stdin, stdout and stderr that are closed:
/// the next file opened would take their place, and have what is printed written into it. And lets a write beyond the
/// limit on a file's size (`ulimit -f`) fail, as one on a full disk does, where SIGXFSZ would kill.
inline void prepare_process() noexcept {
  int descriptor = 0;
  do descriptor = ::open("/dev/null", O_RDWR);
  while (descriptor >= 0 && descriptor <= STDERR_FILENO);
  if (descriptor >= 0) ::close(descriptor);
  ::signal(SIGXFSZ, SIG_IGN);
}

}  // namespace ddpkit
