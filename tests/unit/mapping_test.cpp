// Pages shared between processes, and between the threads of one.
#include "comm/shm/mapping.h"

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "support/catch.h"

using ddpkit::shm::Mapping;

namespace {

constexpr std::size_t kBytes = 16384;

}  // namespace

TEST_CASE("pages that a process maps already are not mapped a second time") {
  Mapping created = Mapping::create("test", kBytes);
  std::byte* const data = created.data();
  std::strcpy(reinterpret_cast<char*>(data), "still there");
  Mapping opened = Mapping::open(::getpid(), created.descriptor(), kBytes);
  CHECK(opened.data() == data);
  CHECK(opened.size() == kBytes);
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
    const Mapping other = Mapping::create("test", kBytes);
    CHECK(other.data() != data);
    CHECK(other.data()[0] == std::byte{0});
  }
}

TEST_CASE("pages that nobody maps any more are mapped afresh, with what they hold") {
  Mapping created = Mapping::create("test", kBytes);
  created.data()[kBytes - 1] = std::byte{42};
  const int descriptor = ::dup(created.descriptor());
  created = Mapping();
  const Mapping opened = Mapping::open(::getpid(), descriptor, kBytes);
  CHECK(opened.data()[kBytes - 1] == std::byte{42});
  ::close(descriptor);
}

TEST_CASE("threads open and let go of the same pages") {
  const Mapping created = Mapping::create("test", kBytes);
  const int descriptor = ::dup(created.descriptor());
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        const Mapping shared = Mapping::open(::getpid(), created.descriptor(), kBytes);
        if (shared.data() != created.data()) ++wrong;
        // Of another length, these have no mapping but the threads', which come and go.
        const Mapping part = Mapping::open(::getpid(), descriptor, kBytes / 2, Mapping::Fill::kOnTouch);
        if (part.data() == nullptr || part.size() != kBytes / 2 || part.data()[0] != std::byte{0}) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ::close(descriptor);
  CHECK(wrong == 0);
}
