#include "comm/host.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <ddpkit/error.h>

namespace ddpkit {
namespace {

[[noreturn]] void throw_unreadable(const char* call, const std::string& path) {
  throw Error(fmt::format("{} of {} failed: {}; the ranks compare it to find out whether they are on one host", call,
                          path, std::strerror(errno)));
}

}  // namespace

std::string boot_id() {
  const std::string path = "/proc/sys/kernel/random/boot_id";
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) return {};
  if (fd < 0) throw_unreadable("open", path);
  char text[64];
  const ssize_t length = ::read(fd, text, sizeof text);
  const int error = errno;
  ::close(fd);
  errno = error;
  if (length < 0) throw_unreadable("read", path);
  return {text, std::find(text, text + length, '\n')};
}

std::uint64_t namespace_number(const char* kind) {
  const std::string path = std::string("/proc/self/ns/") + kind;
  struct stat space {};
  if (::stat(path.c_str(), &space) == 0) return space.st_ino;
  if (errno != ENOENT) throw_unreadable("stat", path);
  return 0;
}

}  // namespace ddpkit
