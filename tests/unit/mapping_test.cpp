// Pages shared between processes, and between the threads of one process.
#include "comm/shm/mapping.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include <ddpkit/error.h>

#include "comm/host.h"
#include "support/catch.h"

using ddpkit::shm::Mapping;

namespace {

constexpr std::size_t kMappedBytes = 16384;
/// Computed at run time: each test case has a separate process.
ddpkit::shm::RankProcessId this_process() { return {.rank = 0, .pid = ::getpid()}; }

}  // namespace

TEST_CASE("pages that a process maps already are not mapped a second time") {
  Mapping created = Mapping::create("test", kMappedBytes);
  std::byte* const data = created.data();
  std::strcpy(reinterpret_cast<char*>(data), "still there");
  Mapping opened = Mapping::open(this_process(), created.descriptor(), kMappedBytes);
  CHECK(opened.data() == data);
  CHECK(opened.size() == kMappedBytes);
  CHECK(opened.descriptor() == -1);

  SECTION("they stay for as long as either mapping does") {
    created = Mapping();
    CHECK(std::strcmp(reinterpret_cast<char*>(opened.data()), "still there") == 0);
  }
  SECTION("moving a mapping moves its share") {
    Mapping moved = std::move(opened);
    CHECK(moved.data() == data);
    CHECK(opened.data() == nullptr);
    CHECK(opened.size() == 0);
    { const Mapping gone = std::move(moved); }
    CHECK(created.data() == data);
  }
  SECTION("pages of another file are others") {
    const Mapping other = Mapping::create("test", kMappedBytes);
    CHECK(other.data() != data);
    CHECK(other.data()[0] == std::byte{0});
  }
}

TEST_CASE("pages that nobody maps any more are mapped afresh, with what they hold") {
  Mapping created = Mapping::create("test", kMappedBytes);
  created.data()[kMappedBytes - 1] = std::byte{42};
  const int descriptor = ::dup(created.descriptor());
  created = Mapping();
  const Mapping opened = Mapping::open(this_process(), descriptor, kMappedBytes);
  CHECK(opened.data()[kMappedBytes - 1] == std::byte{42});
  ::close(descriptor);
}

TEST_CASE("threads open and release the same pages") {
  const Mapping created = Mapping::create("test", kMappedBytes);
  const int descriptor = ::dup(created.descriptor());
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        const Mapping shared = Mapping::open(this_process(), created.descriptor(), kMappedBytes);
        if (shared.data() != created.data()) ++wrong;
        // With another length, only the threads map these pages, again and again.
        const Mapping part = Mapping::open(this_process(), descriptor, kMappedBytes / 2, Mapping::Populate::kLazy);
        if (part.data() == nullptr || part.size() != kMappedBytes / 2 || part.data()[0] != std::byte{0}) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ::close(descriptor);
  CHECK(wrong == 0);
}

TEST_CASE("memory of a rank whose process has ended: the rank is named, not the host") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const Mapping offered = Mapping::create("test", kMappedBytes);
    const int fd = offered.descriptor();
    if (::write(ends[1], &fd, sizeof fd) != sizeof fd) ::_exit(1);
    for (;;) ::pause();
  }
  int fd = -1;
  REQUIRE(::read(ends[0], &fd, sizeof fd) == sizeof fd);
  ::close(ends[0]);
  ::close(ends[1]);
  const ddpkit::shm::RankProcessId owner{.rank = 3, .pid = child};
  CHECK(Mapping::open(owner, fd, kMappedBytes).data()[0] == std::byte{0});
  REQUIRE(::kill(child, SIGKILL) == 0);
  siginfo_t ended{};
  REQUIRE(::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT) == 0);
  const auto check_named = [&] {
    try {
      ::close(ddpkit::shm::open_descriptor(owner, fd, O_RDWR));
      FAIL("opened");
    } catch (const ddpkit::PeerLost& error) {
      CHECK(error.context().rank == 3);
      CHECK_THAT(error.what(), ContainsSubstring("rank 3 (pid " + std::to_string(child) + ") ended"));
    }
  };
  check_named();  // The parent has not reaped the process yet.
  REQUIRE(::waitpid(child, nullptr, 0) == child);
  check_named();
}

TEST_CASE("shared memory can be neither cut off nor executed") {
  const Mapping created = Mapping::create("test", kMappedBytes);
  const int seals = ::fcntl(created.descriptor(), F_GET_SEALS);
  CHECK((seals & F_SEAL_SHRINK) != 0);
  CHECK(::ftruncate(created.descriptor(), 1) != 0);
  struct stat file {};
  REQUIRE(::fstat(created.descriptor(), &file) == 0);
  utsname kernel{};
  REQUIRE(::uname(&kernel) == 0);
  int major = 0, minor = 0;
  REQUIRE(std::sscanf(kernel.release, "%d.%d", &major, &minor) == 2);
  if (major * 1000 + minor >= 6003) CHECK((file.st_mode & 0111) == 0);
}

TEST_CASE("a limit of open files is named") {
  const Mapping created = Mapping::create("test", kMappedBytes);
  rlimit limit{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  limit.rlim_cur = 0;
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
  CHECK_THROWS_WITH(Mapping::open({.rank = 2, .pid = ::getpid()}, created.descriptor(), kMappedBytes),
                    ContainsSubstring("Too many open files") && ContainsSubstring("ulimit -n") &&
                        !ContainsSubstring("must run on one host"));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // Which map more addresses than any limit.
TEST_CASE("a limit of addresses is named, and arenas shrink below it") {
  rlimit limit{};
  REQUIRE(::getrlimit(RLIMIT_AS, &limit) == 0);
  limit.rlim_cur = std::size_t{16} << 30;
  REQUIRE(::setrlimit(RLIMIT_AS, &limit) == 0);
  CHECK(*ddpkit::available_addresses() < limit.rlim_cur);
  CHECK(ddpkit::arena_budget(4) <= limit.rlim_cur / 8);
  CHECK_THROWS_WITH(Mapping::create("test", std::size_t{20} << 30, Mapping::Populate::kLazy),
                    ContainsSubstring("RLIMIT_AS (ulimit -v)") && ContainsSubstring("arena_mb"));
}
#endif

TEST_CASE("memory that a rank has closed after a failure is not waited for") {
  int calls = 0;
  const auto has_closed = [&] { return ++calls > 0; };
  CHECK_THROWS_AS(
      Mapping::open({.rank = 2, .pid = ::getpid()}, 9999, kMappedBytes, Mapping::Populate::kEager, has_closed),
      ddpkit::RendezvousError);
  CHECK(calls == 1);
}

TEST_CASE("memory that a living rank does not show") {
  try {
    Mapping::open({.rank = 2, .pid = ::getpid()}, 9999, kMappedBytes);
    FAIL("opened");
  } catch (const ddpkit::RendezvousError& error) {
    CHECK(error.context().rank == 2);
    CHECK_THAT(error.what(), ContainsSubstring("rank 2") && ContainsSubstring("must run on one host"));
  }
}
