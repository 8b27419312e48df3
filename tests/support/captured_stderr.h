// Captures the test process's stderr.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <string>

#include "support/folder.h"

namespace ddpkit::testing {

/// Returns the output of `action` on stderr, from any thread. Rethrows exceptions of `action`.
inline std::string stderr_of(const std::function<void()>& action) {
  const Folder folder;
  const std::string path = folder / "stderr";
  std::fflush(stderr);
  const int before = ::dup(STDERR_FILENO);
  const int file = ::open(path.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
  ::dup2(file, STDERR_FILENO);
  std::exception_ptr thrown;
  try {
    action();
  } catch (...) {
    thrown = std::current_exception();
  }
  std::fflush(stderr);
  ::dup2(before, STDERR_FILENO);
  ::close(before);
  ::close(file);
  if (thrown) std::rethrow_exception(thrown);
  return read_file(path);
}

}  // namespace ddpkit::testing
