// How a process detects the end of another one.
#include "comm/shm/process_watch.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>

#include "comm/timeout.h"
#include "support/catch.h"

using ddpkit::shm::life_page;
using ddpkit::shm::LifePage;
using ddpkit::shm::ProcessWatch;

namespace {

bool ends_within(const ProcessWatch& watch, std::chrono::milliseconds patience) {
  return ddpkit::poll_until(std::chrono::steady_clock::now() + patience, [&] { return !watch.alive(); });
}

/// A process that uses `bytes` of memory until it is killed.
class Child {
 public:
  explicit Child(std::size_t bytes) {
    std::array<int, 2> ends;
    REQUIRE(::pipe(ends.data()) == 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      void* const memory =
          ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
      const LifePage page = memory == MAP_FAILED ? LifePage{} : life_page();
      static_cast<void>(!::write(ends[1], &page, sizeof page));
      for (;;) ::pause();
    }
    REQUIRE(pid_ > 0);
    REQUIRE(::read(ends[0], &life_, sizeof life_) == sizeof life_);
    for (const int end : ends) ::close(end);
  }
  ~Child() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  int pid() const { return pid_; }
  LifePage life() const { return life_; }

 private:
  int pid_ = -1;
  LifePage life_;
};

/// An emulator may lack robust futexes. Then only the pidfd shows the end of a process.
#define NEEDS_ROBUST_FUTEXES()                                                   \
  do {                                                                           \
    void* head = nullptr;                                                        \
    std::size_t size = 0;                                                        \
    if (::syscall(SYS_get_robust_list, 0, &head, &size) != 0 && errno == ENOSYS) \
      DDPKIT_SKIP("this system has no robust futexes");                          \
  } while (false)

constexpr std::size_t kSmall = 4096, kLarge = std::size_t{512} << 20;

}  // namespace

TEST_CASE("a process runs until it is killed") {
  NEEDS_ROBUST_FUTEXES();
  const bool with_page = GENERATE(true, false);
  const Child child(kSmall);
  REQUIRE(child.life().fd >= 0);
  const ProcessWatch watch(child.pid(), with_page ? child.life() : LifePage{});
  CHECK(watch.alive());
  CHECK_FALSE(ends_within(watch, std::chrono::milliseconds(20)));
  ::kill(child.pid(), SIGKILL);
  CHECK(ends_within(watch, std::chrono::seconds(30)));
}

TEST_CASE("the end of a large process is known before the kernel has freed its memory") {
  NEEDS_ROBUST_FUTEXES();
  bool early = false;
  for (int attempt = 0; attempt < 20 && !early; ++attempt) {  // This process may not run at the right time.
    const Child child(kLarge);
    const ProcessWatch by_page(child.pid(), child.life()), by_pidfd(child.pid());
    ::kill(child.pid(), SIGKILL);
    REQUIRE(ends_within(by_page, std::chrono::seconds(30)));
    early = by_pidfd.alive();
  }
  CHECK(early);
}

TEST_CASE("a child of fork has a separate page") {
  NEEDS_ROBUST_FUTEXES();
  REQUIRE(life_page().fd >= 0);
  CHECK(life_page().fd == life_page().fd);
  const Child child(kSmall);
  const ProcessWatch own(::getpid(), life_page()), watch(child.pid(), child.life());
  ::kill(child.pid(), SIGKILL);
  CHECK(ends_within(watch, std::chrono::seconds(30)));
  CHECK(own.alive());
}

TEST_CASE("a process with a wrong page is watched by its pidfd") {
  const int inherited = life_page().fd;
  const Child child(kSmall);
  LifePage page = child.life();
  SECTION("no such descriptor") { page.fd = 4000; }
  SECTION("another file") { page.fd = STDERR_FILENO; }
  SECTION("another process's page") { page.fd = inherited; }
  const ProcessWatch watch(child.pid(), page);
  CHECK(watch.alive());
  ::kill(child.pid(), SIGKILL);
  CHECK(ends_within(watch, std::chrono::seconds(30)));
}
