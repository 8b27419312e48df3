// The calls to inject failures into, shared by the test and the library that injects them.
#pragma once

#include <array>
#include <cerrno>
#include <cstddef>
#include <string_view>

namespace ddpkit::testing {

struct Call {
  std::string_view name;
  std::array<int, 2> errors;  ///< Errors to inject, in turn. If the second is 0, there is only one.
};

/// "clone" is pthread_create(), "open" includes fopen().
inline constexpr std::array kCalls = {
    Call{"accept", {EMFILE, ECONNABORTED}},
    Call{"bind", {EADDRINUSE, EACCES}},
    Call{"clone", {EAGAIN, 0}},
    Call{"connect", {ECONNREFUSED, ENETUNREACH}},
    Call{"epoll_create", {EMFILE, 0}},
    Call{"epoll_ctl", {ENOMEM, ENOSPC}},
    Call{"epoll_wait", {EINTR, 0}},
    Call{"eventfd", {EMFILE, ENFILE}},
    Call{"execve", {EACCES, ENOMEM}},
    Call{"fallocate", {ENOSPC, EOPNOTSUPP}},
    Call{"flock", {EWOULDBLOCK, ENOLCK}},
    Call{"fork", {EAGAIN, ENOMEM}},
    Call{"fsync", {EIO, ENOSPC}},
    Call{"ftruncate", {ENOSPC, EINTR}},
    Call{"futex", {EINTR, EAGAIN}},
    Call{"getsockname", {ENOBUFS, 0}},
    Call{"link", {EPERM, EMLINK}},
    Call{"listen", {EADDRINUSE, 0}},
    Call{"madvise", {EINVAL, EAGAIN}},
    Call{"memfd_create", {EMFILE, ENOSYS}},
    Call{"mkdir", {EACCES, ENOSPC}},
    Call{"mmap", {ENOMEM, EAGAIN}},
    Call{"open", {EMFILE, EACCES}},
    Call{"opendir", {EMFILE, EACCES}},
    Call{"pidfd_open", {ENOSYS, EMFILE}},
    Call{"pipe", {EMFILE, ENFILE}},
    Call{"poll", {EINTR, ENOMEM}},
    Call{"read", {EIO, EINTR}},
    Call{"recv", {ECONNRESET, EINTR}},
    Call{"rename", {EIO, EACCES}},
    Call{"send", {ECONNRESET, EINTR}},
    Call{"setaffinity", {EPERM, 0}},
    Call{"setsockopt", {ENOMEM, 0}},
    Call{"socket", {EMFILE, ENFILE}},
    Call{"stat", {EIO, EACCES}},
    Call{"unlink", {EACCES, EBUSY}},
    Call{"wait", {EINTR, 0}},
    Call{"write", {ENOSPC, EINTR}},
};

constexpr int number_of(std::string_view name) {
  for (std::size_t i = 0; i < kCalls.size(); ++i) {
    if (kCalls[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

/// The launcher, rank 0 and rank 1.
inline constexpr int kProcesses = 3;

struct CallCounts {
  int uses[kCalls.size()] = {};  ///< [call]
};

}  // namespace ddpkit::testing
