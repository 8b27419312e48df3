// Tier 0: the standard library only.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

namespace ddpkit {

/// Call first in main(). Opens /dev/null for stdin, stdout or stderr if they are closed; otherwise the next opened file
/// would get their descriptor and receive printed output. Ignores SIGXFSZ, so that a write beyond the file size limit
/// (`ulimit -f`) fails like a write to a full disk and does not kill the process.
inline void prepare_process() noexcept {
  int descriptor = 0;
  do descriptor = ::open("/dev/null", O_RDWR);
  while (descriptor >= 0 && descriptor <= STDERR_FILENO);
  if (descriptor >= 0) ::close(descriptor);
  ::signal(SIGXFSZ, SIG_IGN);
}

}  // namespace ddpkit
