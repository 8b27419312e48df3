// A library for LD_PRELOAD. It counts a program's calls to the C library and makes one of them fail.
//   DDPKIT_TEST_CALLS=FILE               the file for the counts: one CallCounts per process
//   DDPKIT_TEST_INJECT="WHO CALL N ERRNO"  the N-th use of CALL by process WHO fails with the number ERRNO
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "syscalls/calls.h"

namespace ddpkit::testing {
namespace {

struct Injection {
  int call = -1;  ///< -1: no call of this process fails.
  int use = 0;
  int error = 0;
};

Injection injection;
/// Processes forked by the launcher share its counts until they call exec.
CallCounts* counts = nullptr;

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

/// Counts one use. Returns the error with which this use fails, 0 if it does not.
int count(int call) {
  if (!counts) return 0;
  const int use = std::atomic_ref(counts->uses[call]).fetch_add(1) + 1;
  return call == injection.call && use == injection.use ? injection.error : 0;
}

bool is_file(long descriptor) {
  struct stat file {};
  static const auto real = next<int(int, struct stat*)>("fstat");
  return real(static_cast<int>(descriptor), &file) == 0 && S_ISREG(file.st_mode);
}

/// Linux wakes sleepers without an error. A program sleeps forever if the kernel does not wake it.
bool is_futex_wait(long number, long operation) {
  const long command = operation & FUTEX_CMD_MASK;
  return number == SYS_futex && (command == FUTEX_WAIT || command == FUTEX_WAIT_BITSET);
}

/// Called when main() begins: calls of the dynamic linker and static constructors do not count.
void begin() {
  const char* file = std::getenv("DDPKIT_TEST_CALLS");
  if (!file) return;
  const char* rank = std::getenv("RANK");
  const int who = rank ? 1 + std::atoi(rank) : 0;
  if (who >= kProcesses) return;
  const int fd = ::open(file, O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  void* mapped = ::mmap(nullptr, kProcesses * sizeof(CallCounts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (mapped == MAP_FAILED) return;
  if (const char* text = std::getenv("DDPKIT_TEST_INJECT")) {
    char call[32];
    int victim = -1;
    if (std::sscanf(text, "%d %31s %d %d", &victim, call, &injection.use, &injection.error) == 4 && victim == who)
      injection.call = number_of(call);
  }
  counts = static_cast<CallCounts*>(mapped) + who;
}

int (*program)(int, char**, char**) = nullptr;

int counted_main(int argc, char** argv, char** environment) {
  begin();
  return program(argc, argv, environment);
}

}  // namespace
}  // namespace ddpkit::testing

using ddpkit::testing::count;
using ddpkit::testing::is_file;
using ddpkit::testing::next;
using ddpkit::testing::number_of;

// A call takes at most six integers and pointers, and returns one, in registers. So all wrappers have the same
// signature, whatever their headers declare. The call's name is only an assembler label.
#define DDPKIT_COUNT(call, symbol, fails) DDPKIT_COUNT_IF(true, call, symbol, fails)
#define DDPKIT_COUNT_IF(counted, call, symbol, fails)                                                                \
  extern "C" long counted_##symbol(long, long, long, long, long, long) __asm__(#symbol);                             \
  extern "C"                                                                                                         \
      __attribute__((visibility("default"))) long counted_##symbol(long a, long b, long c, long d, long e, long f) { \
    static const auto real = next<long(long, long, long, long, long, long)>(#symbol);                                \
    static constexpr int number = number_of(#call);                                                                  \
    static_assert(number >= 0);                                                                                      \
    const int error = (counted) ? count(number) : 0;                                                                 \
    if (error == 0) return real(a, b, c, d, e, f);                                                                   \
    errno = error;                                                                                                   \
    return fails;                                                                                                    \
  }

DDPKIT_COUNT(accept, accept, -1)
DDPKIT_COUNT(accept, accept4, -1)
DDPKIT_COUNT(bind, bind, -1)
DDPKIT_COUNT(clone, pthread_create, error)
DDPKIT_COUNT(connect, connect, -1)
DDPKIT_COUNT(epoll_create, epoll_create1, -1)
DDPKIT_COUNT(epoll_ctl, epoll_ctl, -1)
DDPKIT_COUNT(epoll_wait, epoll_wait, -1)
DDPKIT_COUNT(epoll_wait, epoll_pwait, -1)
DDPKIT_COUNT(eventfd, eventfd, -1)
DDPKIT_COUNT(execve, execvpe, -1)
DDPKIT_COUNT(fallocate, fallocate, -1)
DDPKIT_COUNT(fallocate, fallocate64, -1)
DDPKIT_COUNT(flock, flock, -1)
DDPKIT_COUNT(fork, fork, -1)
DDPKIT_COUNT(fsync, fsync, -1)
DDPKIT_COUNT(ftruncate, ftruncate, -1)
DDPKIT_COUNT(ftruncate, ftruncate64, -1)
DDPKIT_COUNT(getsockname, getsockname, -1)
DDPKIT_COUNT(link, link, -1)
DDPKIT_COUNT(listen, listen, -1)
DDPKIT_COUNT(madvise, madvise, -1)
DDPKIT_COUNT(memfd_create, memfd_create, -1)
DDPKIT_COUNT(mkdir, mkdir, -1)
DDPKIT_COUNT(mmap, mmap, -1)
DDPKIT_COUNT(mmap, mmap64, -1)
DDPKIT_COUNT(open, fopen, 0)
DDPKIT_COUNT(open, fopen64, 0)
DDPKIT_COUNT(open, open, -1)
DDPKIT_COUNT(open, open64, -1)
DDPKIT_COUNT(open, openat, -1)
DDPKIT_COUNT(open, openat64, -1)
DDPKIT_COUNT(opendir, opendir, 0)
DDPKIT_COUNT(pipe, pipe2, -1)
DDPKIT_COUNT(poll, poll, -1)
DDPKIT_COUNT(read, read, -1)
DDPKIT_COUNT(recv, recv, -1)
DDPKIT_COUNT(rename, rename, -1)
DDPKIT_COUNT(send, send, -1)
DDPKIT_COUNT(send, sendmsg, -1)
DDPKIT_COUNT(setaffinity, sched_setaffinity, -1)
DDPKIT_COUNT(setsockopt, setsockopt, -1)
DDPKIT_COUNT(socket, socket, -1)
DDPKIT_COUNT(stat, fstat, -1)
DDPKIT_COUNT(stat, fstat64, -1)
DDPKIT_COUNT(stat, stat, -1)
DDPKIT_COUNT(stat, stat64, -1)
DDPKIT_COUNT(unlink, remove, -1)
DDPKIT_COUNT(unlink, unlink, -1)
DDPKIT_COUNT(wait, waitpid, -1)

// Only files can run out of disk space, not pipes and sockets.
DDPKIT_COUNT_IF(is_file(a), write, write, -1)
DDPKIT_COUNT_IF(is_file(a), write, writev, -1)

extern "C" long counted_syscall(long, long, long, long, long, long, long) __asm__("syscall");
extern "C" __attribute__((visibility("default"))) long counted_syscall(long number, long a, long b, long c, long d,
                                                                       long e, long f) {
  static const auto real = next<long(long, long, long, long, long, long, long)>("syscall");
  const int call = ddpkit::testing::is_futex_wait(number, b) ? number_of("futex")
                   : number == SYS_pidfd_open                ? number_of("pidfd_open")
                                                             : -1;
  const int error = call >= 0 ? count(call) : 0;
  if (error == 0) return real(number, a, b, c, d, e, f);
  errno = error;
  return -1;
}

extern "C" __attribute__((visibility("default"))) int __libc_start_main(int (*main)(int, char**, char**), int argc,
                                                                        char** argv, void (*init)(), void (*fini)(),
                                                                        void (*linker_fini)(), void* stack_end) {
  ddpkit::testing::program = main;
  return next<decltype(__libc_start_main)>("__libc_start_main")(ddpkit::testing::counted_main, argc, argv, init, fini,
                                                                linker_fini, stack_end);
}
