// Shared pages that a rank can write privately.
#include "comm/shm/copy_on_write_view.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include <algorithm>

#include <ddpkit/error.h>

#include "comm/shm/mapping.h"
#include "support/catch.h"

using ddpkit::shm::CopyOnWriteView;
using ddpkit::shm::Mapping;

namespace {

constexpr std::size_t kBytes = (std::size_t{1} << 20) + 100;

struct Shared {
  Mapping mapping = Mapping::create("test", kBytes);
  CopyOnWriteView view{{.rank = 0, .pid = ::getpid()}, mapping.descriptor(), kBytes};
};

}  // namespace

TEST_CASE("a view shows what is written to the shared pages") {
  Shared shared;
  CHECK(shared.view.data() != shared.mapping.data());
  for (const std::size_t at : {std::size_t{0}, std::size_t{70000}, kBytes - 1}) {
    shared.mapping.data()[at] = std::byte{7};
    CHECK(shared.view.data()[at] == std::byte{7});
  }
  CHECK_FALSE(shared.view.is_written());
}

TEST_CASE("writes to a view stay, are tracked, and can be discarded") {
  Shared shared;
  CopyOnWriteView other({.rank = 0, .pid = ::getpid()}, shared.mapping.descriptor(), kBytes);
  std::memset(shared.mapping.data(), 1, kBytes);
  const std::size_t second = shared.view.granule_bytes();
  std::memset(shared.view.data() + second, 2, second + 1);  // The second granule and the first byte of the third.
  CHECK(shared.view.data()[second] == std::byte{2});
  CHECK(shared.view.data()[2 * second] == std::byte{2});
  CHECK(shared.view.data()[2 * second + 1] == std::byte{1});
  CHECK(shared.mapping.data()[second] == std::byte{1});
  CHECK(other.data()[second] == std::byte{1});
  CHECK(shared.view.is_written());
  std::vector<std::size_t> written;
  for (std::size_t g = 0; g < shared.view.granules(); ++g) {
    if (shared.view.is_written(g)) written.push_back(g);
  }
  CHECK(written == std::vector<std::size_t>{1, 2});
  CHECK_FALSE(other.is_written());

  shared.mapping.data()[second] = std::byte{3};
  shared.view.reset();
  CHECK_FALSE(shared.view.is_written());
  CHECK(shared.view.data()[second] == std::byte{3});
  CHECK(shared.view.data()[2 * second] == std::byte{1});

  shared.view.data()[kBytes - 1] = std::byte{9};  // Guarded again.
  CHECK(shared.view.is_written(shared.view.granules() - 1));
  CHECK(shared.mapping.data()[kBytes - 1] == std::byte{1});
}

TEST_CASE("several threads may write to a view at once") {
  Shared shared;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&shared, t] {
      for (std::size_t i = static_cast<std::size_t>(t); i < kBytes; i += 4) shared.view.data()[i] = std::byte{5};
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(std::count(shared.view.data(), shared.view.data() + kBytes, std::byte{5}) ==
        static_cast<std::ptrdiff_t>(kBytes));
  CHECK(shared.mapping.data()[0] == std::byte{0});
}

TEST_CASE("other faults still end the process") {
  Shared shared;
  const pid_t child = ::fork();
  if (child == 0) {
    shared.view.data()[0] = std::byte{1};  // The view's handler permits this write.
    ::alarm(20);
    volatile char* nowhere = nullptr;
    *nowhere = 1;
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  // The sanitizers' handlers exit instead.
  const bool ended = WIFSIGNALED(status) ? WTERMSIG(status) == SIGSEGV : WEXITSTATUS(status) != 0;
  CHECK(ended);
}

namespace {

sigjmp_buf after_fault;
void recover(int, siginfo_t*, void*) { siglongjmp(after_fault, 1); }
void let_pass(int, siginfo_t* info, void*) {
  const auto page = reinterpret_cast<std::uintptr_t>(info->si_addr) & ~std::uintptr_t{4095};
  ::mprotect(reinterpret_cast<void*>(page), 4096, PROT_READ | PROT_WRITE);
}

}  // namespace

TEST_CASE("a program that recovers from its faults continues to do so") {
  for (const auto handler : {recover, let_pass}) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      struct sigaction action {};
      action.sa_sigaction = handler;
      action.sa_flags = SA_SIGINFO | SA_NODEFER;
      ::sigaction(SIGSEGV, &action, nullptr);
      Shared shared;
      void* own = ::mmap(nullptr, 8 * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      static int recovered = 0;  // Static: a jump does not change it.
      for (static int i = 0; i < 4; ++i) {
        shared.view.data()[static_cast<std::size_t>(i) * shared.view.granule_bytes()] = std::byte{1};
        if (sigsetjmp(after_fault, 1) == 0) {
          static_cast<volatile char*>(own)[i * 4096] = 1;
          if (handler == let_pass) ++recovered;
        } else {
          ++recovered;
        }
      }
      ::_exit(recovered == 4 && shared.view.is_written() ? 0 : 3);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CAPTURE(handler == recover);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
  }
}

TEST_CASE("a view of nothing is an error") {
  CHECK_THROWS_AS(CopyOnWriteView({.rank = 0, .pid = ::getpid()}, 9999, 4096), ddpkit::Error);
}
