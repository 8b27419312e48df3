#include "comm/shm/arena.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "support/catch.h"

using ddpkit::ArenaStats;
using ddpkit::shm::Arena;
using ddpkit::shm::Mapping;
using ddpkit::shm::SymmetricSegment;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
/// Bytes before each block.
constexpr std::size_t kHeader = 64;

std::shared_ptr<SymmetricSegment> segment_of(std::size_t bytes) {
  auto segment = std::make_shared<SymmetricSegment>();
  segment->id = 1;
  segment->bytes = bytes;
  segment->mappings.push_back(Mapping::create("arena-test", bytes, Mapping::Populate::kLazy));
  segment->base.push_back(segment->mappings[0].data());
  return segment;
}

/// Returns the bytes that a request of `bytes` takes from the arena.
std::size_t taken_by(Arena& arena, std::size_t bytes) {
  const std::size_t before = arena.stats().in_use;
  void* data = arena.allocate(bytes);
  REQUIRE(data);
  const std::size_t taken = arena.stats().in_use - before;
  arena.free(data);
  REQUIRE(arena.stats().in_use == before);
  return taken;
}

/// Allocates blocks of `bytes` until the arena is full.
std::vector<void*> fill(Arena& arena, std::size_t bytes, bool urgent) {
  std::vector<void*> blocks;
  while (void* data = arena.allocate(bytes, urgent)) blocks.push_back(data);
  return blocks;
}

}  // namespace

TEST_CASE("an arena's blocks are large enough, and no quarter larger") {
  Arena arena(segment_of(16 * kMiB), 0, 0);
  for (std::size_t around = Arena::kSmallest; around <= kMiB; around *= 2) {
    for (const std::size_t part : {0u, 1u, 2u, 3u}) {
      for (const std::size_t off : {std::size_t{0}, kHeader}) {
        for (const int by : {-1, 0, 1}) {
          const std::size_t bytes = around + part * around / 4 - off + static_cast<std::size_t>(by);
          if (bytes < Arena::kSmallest) continue;
          CAPTURE(bytes);
          const std::size_t taken = taken_by(arena, bytes);
          CHECK(taken >= bytes + kHeader);
          CHECK(4 * taken <= 5 * (bytes + kHeader));
        }
      }
    }
  }
  CHECK(taken_by(arena, 0) == taken_by(arena, Arena::kSmallest));
  CHECK(arena.stats().refused == 0);
}

TEST_CASE("an arena's blocks are aligned and apart from each other") {
  Arena arena(segment_of(4 * kMiB), 0, 0);
  std::vector<std::pair<unsigned char*, std::size_t>> blocks;
  for (const std::size_t bytes : {1u, 4096u, 4097u, 5000u, 6144u, 8192u, 100000u, 262143u, 4096u, 65536u}) {
    auto* data = static_cast<unsigned char*>(arena.allocate(bytes));
    REQUIRE(data);
    CHECK(reinterpret_cast<std::uintptr_t>(data) % 64 == 0);
    CHECK(arena.contains(data));
    CHECK(arena.contains(data + bytes - 1));
    std::memset(data, static_cast<int>(blocks.size() + 1), bytes);
    blocks.emplace_back(data, bytes);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const auto [data, bytes] = blocks[i];
    std::size_t wrong = 0;
    for (std::size_t k = 0; k < bytes; ++k) wrong += data[k] != i + 1;
    CHECK(wrong == 0);
  }
}

TEST_CASE("an arena hands out first what was freed last") {
  Arena arena(segment_of(4 * kMiB), 0, 0);
  void* const first = arena.allocate(10000);
  void* const second = arena.allocate(10000);
  const std::size_t reserved = arena.stats().reserved;
  arena.free(first);
  arena.free(second);
  CHECK(arena.stats().in_use == 0);
  CHECK(arena.allocate(10010) == second);  // The same size class.
  CHECK(arena.allocate(10000) == first);
  const ArenaStats stats = arena.stats();
  CHECK(stats.reserved == reserved);
  CHECK(stats.allocations == 4);
  CHECK(stats.peak == stats.in_use);
  CHECK(stats.capacity == 4 * kMiB);
}

TEST_CASE("an arena keeps its reserve for urgent requests") {
  Arena arena(segment_of(kMiB), 0, kMiB / 4);
  const std::size_t bytes = 16384 - kHeader;
  const auto ordinary = fill(arena, bytes, false);
  CHECK(ordinary.size() == 48);
  CHECK(arena.stats().in_use == kMiB - kMiB / 4);
  CHECK(arena.stats().refused == 1);
  const auto urgent = fill(arena, bytes, true);
  CHECK(urgent.size() == 16);
  CHECK(arena.stats().in_use == kMiB);
  CHECK(arena.stats().reserved == kMiB);
  CHECK(arena.stats().refused == 2);
  SECTION("a part of a larger block is better than none, and its rest stays free") {
    arena.free(urgent[3]);
    void* const part = arena.allocate(4096);
    REQUIRE(part == urgent[3]);
    void* const rest = arena.allocate(8192 - kHeader);
    REQUIRE(rest == static_cast<std::byte*>(part) + 5120);
    CHECK(arena.allocate(4096) == nullptr);
    arena.free(part);
    arena.free(rest);
    CHECK(arena.stats().in_use == kMiB - bytes - kHeader);
    CHECK(arena.allocate(bytes) == urgent[3]);
    CHECK(arena.stats().in_use == kMiB);
  }
  SECTION("a block of the reserve may be used by anybody once it has been cut") {
    arena.free(urgent[3]);
    CHECK(arena.allocate(bytes) == urgent[3]);
  }
}

TEST_CASE("an arena's free neighbours become one where nothing else is left") {
  Arena arena(segment_of(kMiB), 0, 0);
  auto blocks = fill(arena, 16384 - kHeader, false);
  REQUIRE(blocks.size() == 64);
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(1));
  // Every second block has no free neighbor.
  std::vector<void*> kept;
  for (void* data : blocks) {
    const bool is_even =
        (static_cast<std::byte*>(data) - static_cast<std::byte*>(*std::ranges::min_element(blocks))) % 32768 == 0;
    is_even ? kept.push_back(data) : arena.free(data);
  }
  REQUIRE(kept.size() == 32);
  CHECK(arena.allocate(32768 - kHeader) == nullptr);
  for (void* data : kept) arena.free(data);
  CHECK(arena.stats().in_use == 0);
  void* const whole = arena.allocate(kMiB - kHeader);
  CHECK(whole == *std::ranges::min_element(blocks));
  arena.free(whole);
  CHECK(fill(arena, 16384 - kHeader, false).size() == 64);
  CHECK(arena.stats().reserved == kMiB);
}

TEST_CASE("batches of all lengths share an arena that the longest just fits into") {
  constexpr std::size_t kLongest = 100;
  constexpr std::size_t kStep = 2048;  // Bytes of a tensor per unit of the batch's length.
  const std::vector<std::size_t> widths = {1, 3, 4, 2, 6, 1, 5};
  std::size_t widest = 0;
  for (const std::size_t width : widths) widest += width * kStep * kLongest;
  // A quarter more for the size classes, and the tensor that stays.
  Arena arena(segment_of(widest / 4 * 5 + 2 * kMiB), 0, 0);
  std::mt19937 random(7);
  std::size_t wrong = 0;
  void* stays = nullptr;
  for (std::size_t step = 0; step < 300; ++step) {
    const std::size_t length = step % 50 == 49 ? kLongest : 2 + random() % (kLongest - 1);
    std::vector<std::pair<unsigned char*, std::size_t>> tensors;
    for (const std::size_t width : widths) {
      const std::size_t bytes = width * kStep * length;
      auto* const data = static_cast<unsigned char*>(arena.allocate(bytes));
      REQUIRE(data);
      std::memset(data, static_cast<int>(width), bytes);
      tensors.emplace_back(data, bytes);
      if (!stays) stays = arena.allocate(kMiB);
    }
    for (std::size_t i = tensors.size(); i-- > 0;) {
      const auto [data, bytes] = tensors[i];
      for (std::size_t k = 0; k < bytes; k += 512) wrong += data[k] != widths[i];
      arena.free(data);
    }
  }
  CHECK(wrong == 0);
  CHECK(arena.stats().refused == 0);
}

TEST_CASE("an arena refuses what is larger than itself, up to the largest number") {
  Arena arena(segment_of(kMiB), 0, 0);
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
  for (const bool urgent : {false, true}) {
    for (const std::size_t bytes : {kMiB, kMiB + 1, kMost / 4, kMost / 2, kMost / 2 + 2, kMost / 8 * 7 + 1,
                                    kMost - kHeader, kMost - kHeader + 1, kMost - 3, kMost}) {
      CAPTURE(bytes);
      CHECK(arena.allocate(bytes, urgent) == nullptr);
    }
  }
  CHECK(arena.stats().refused == 20);
  CHECK(arena.stats().in_use == 0);
  Arena tiny(segment_of(4096), 0, 0);
  CHECK(tiny.allocate(1) == nullptr);
  Arena all_reserved(segment_of(kMiB), 0, 2 * kMiB);
  CHECK(all_reserved.allocate(4096) == nullptr);
  CHECK(all_reserved.allocate(4096, true) != nullptr);
}

TEST_CASE("an arena knows its own pages") {
  const auto segment = segment_of(kMiB);
  const std::byte* const pages = segment->base[0];
  Arena arena(segment, 0, 0);
  int outside = 0;
  const auto elsewhere = std::make_unique<int>(0);
  CHECK(arena.contains(pages));
  CHECK(arena.contains(pages + kMiB - 1));
  CHECK_FALSE(arena.contains(pages + kMiB));
  CHECK_FALSE(arena.contains(pages - 1));
  CHECK_FALSE(arena.contains(&outside));
  CHECK_FALSE(arena.contains(elsewhere.get()));
  CHECK_FALSE(arena.contains(nullptr));
  arena.close();
  CHECK_FALSE(arena.contains(pages));
  CHECK_FALSE(arena.contains(nullptr));
}

TEST_CASE("a closed arena releases its pages with the last block") {
  auto segment = segment_of(kMiB);
  const std::weak_ptr<SymmetricSegment> pages = segment;
  Arena arena(std::move(segment), 0, 0);
  auto* const first = static_cast<unsigned char*>(arena.allocate(10000));
  auto* const second = static_cast<unsigned char*>(arena.allocate(20000));
  first[9999] = 1;
  second[19999] = 2;
  arena.free(arena.allocate(10000));
  arena.close();
  CHECK(arena.allocate(10000) == nullptr);
  CHECK(arena.allocate(10000, true) == nullptr);
  CHECK(first[9999] == 1);
  arena.free(first);
  CHECK_FALSE(pages.expired());
  CHECK(arena.contains(second));
  CHECK(second[19999] == 2);
  arena.free(second);
  CHECK(pages.expired());
  CHECK_FALSE(arena.contains(second));
  CHECK(arena.stats().in_use == 0);
  CHECK(arena.allocate(10000) == nullptr);
}

TEST_CASE("a closed arena without blocks releases its pages at once") {
  auto segment = segment_of(kMiB);
  const std::weak_ptr<SymmetricSegment> pages = segment;
  Arena arena(std::move(segment), 0, 0);
  arena.free(arena.allocate(10000));
  arena.close();
  CHECK(pages.expired());
}

TEST_CASE("threads share an arena until it is closed") {
  struct Held {
    std::uint64_t* data;
    std::size_t words;
    std::uint64_t mark;
  };
  constexpr std::size_t kCapacity = 4 * kMiB;
  auto segment = segment_of(kCapacity);
  const std::weak_ptr<SymmetricSegment> pages = segment;
  Arena arena(std::move(segment), 0, kMiB / 2);
  std::atomic<int> wrong = 0;
  std::atomic<int> served = 0;
  std::mutex mutex;
  std::vector<Held> passed_on;  // Another thread frees these blocks.
  const auto free_block = [&](const Held& held) {
    std::size_t other = 0;
    for (std::size_t i = 0; i < held.words; ++i) other += held.data[i] != held.mark;
    if (other != 0 || !arena.contains(held.data)) ++wrong;
    arena.free(held.data);
  };
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 random(thread);
      const auto elsewhere = std::make_unique<int>(0);
      std::vector<Held> held;
      for (std::uint64_t turn = 0; turn < 2000; ++turn) {
        if (thread == 0 && turn == 1500) arena.close();
        const std::size_t words = 512 + random() % 4096;
        if (void* data = arena.allocate(words * sizeof(std::uint64_t), random() % 8 == 0)) {
          held.push_back({static_cast<std::uint64_t*>(data), words, turn * 4 + thread});
          for (std::size_t i = 0; i < words; ++i) held.back().data[i] = held.back().mark;
          ++served;
        }
        if (arena.contains(elsewhere.get())) ++wrong;
        const ArenaStats stats = arena.stats();
        if (stats.in_use > stats.peak || stats.peak > kCapacity || stats.reserved > kCapacity) ++wrong;
        while (held.size() > 40 || (!held.empty() && random() % 3 == 0)) {
          std::swap(held[random() % held.size()], held.back());
          Held last = held.back();
          held.pop_back();
          if (random() % 2 == 0) {
            const std::lock_guard lock(mutex);
            passed_on.push_back(last);
            if (passed_on.size() < 10) continue;
            std::swap(last, passed_on[random() % passed_on.size()]);
            passed_on.pop_back();
          }
          free_block(last);
        }
      }
      for (const Held& last : held) free_block(last);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(pages.expired() == passed_on.empty());
  for (const Held& last : passed_on) free_block(last);
  CHECK(wrong == 0);
  CHECK(served > 0);
  CHECK(arena.stats().in_use == 0);
  CHECK(pages.expired());
}

TEST_CASE("an arena owns no foreign pointer, also while it releases its pages") {
  const auto elsewhere = std::make_unique<int>(0);
  int outside = 0;
  std::atomic<int> wrong = 0;
  for (int round = 0; round < 200; ++round) {
    Arena arena(segment_of(65536), 0, 0);
    void* const block = arena.allocate(5000);
    std::atomic<bool> closing{false};
    std::thread looker([&] {
      while (!closing) std::this_thread::yield();
      for (int look = 0; look < 2000; ++look) {
        if (arena.contains(elsewhere.get()) || arena.contains(&outside)) ++wrong;
      }
    });
    arena.close();
    closing = true;
    arena.free(block);
    looker.join();
  }
  CHECK(wrong == 0);
}
