// Memory as the C++ standard defines it, with every reordering that the standard allows.
//
// Each atomic object has a history of stores. A load may return any store of the history that is not hidden by what
// happens before the load, by coherence, or by the order of sequentially consistent operations and fences (C++20,
// [atomics.order]). Acquire loads synchronize with the release stores that they read. Plain accesses are checked for
// data races with vector clocks.
//
// Two things that the standard allows do not occur: a store never enters the history before an earlier store, and a
// load never returns a store that is executed later. One thing that the standard forbids occurs, because x86 does it: a
// rank that loads its own relaxed or release store, even sequentially consistently, reads it before others can.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace ddpkit::schedules {

inline constexpr int kMaxRanks = 4;

/// The known operations of each rank. [rank]
using Clock = std::array<std::uint32_t, kMaxRanks>;

/// A rank's knowledge of the other ranks.
struct View {
  Clock happened{};           ///< Operations that happen before the rank's next one.
  Clock visible{};            ///< The same, and operations that sequentially consistent fences order before it.
  std::uint32_t ordered = 0;  ///< Sequentially consistent operations before the last such fence.

  void join(const View& other);
};

class Memory {
 public:
  /// `choose(n)` returns which of `n` allowed stores a load reads; 0 is the newest. `fault` does not return.
  Memory(std::function<std::size_t(std::size_t)> choose, std::function<void(const std::string&)> fault)
      : choose_(std::move(choose)), fault_(std::move(fault)) {}

  // Atomic operations on the object of `bytes` bytes at `at`. The newest value is also stored at `at`.
  std::uint64_t load(int rank, void* at, std::size_t bytes, std::memory_order order);
  void store(int rank, void* at, std::size_t bytes, std::uint64_t value, std::memory_order order);
  /// Returns the previous value.
  std::uint64_t modify(int rank, void* at, std::size_t bytes, std::memory_order order,
                       const std::function<std::uint64_t(std::uint64_t)>& change);
  void fence(int rank, std::memory_order order);

  // Plain accesses.
  void read(int rank, const void* at, std::size_t bytes) { access(rank, at, bytes, false); }
  void write(int rank, const void* at, std::size_t bytes) { access(rank, at, bytes, true); }

  /// Everything before this happens before everything after it, on all ranks.
  void synchronize();
  /// Sets to zero all bytes that were accessed.
  void clear();
  std::uint64_t stale_loads() const { return stale_loads_; }

 private:
  struct Store {
    std::uint64_t value = 0;
    View released;              ///< An acquire load of this store learns this.
    Clock seen{};               ///< Time of each rank's first read or write; 0: never.
    std::uint32_t ordered = 0;  ///< Its position among the sequentially consistent operations; 0: none.
    int writer = -1;
  };
  struct Location {
    std::size_t bytes = 0;
    std::vector<Store> history;
    std::array<int, kMaxRanks> stale{};  ///< Consecutive loads that did not read the newest store. [rank]
  };
  struct Rank {
    View view;
    View acquired;  ///< Read by relaxed loads: known after an acquire fence.
    View fenced;    ///< Known at the last release fence.
  };
  /// Bytes with the same history of plain accesses.
  struct Plain {
    std::uintptr_t end = 0;
    int writer = -1;
    std::uint32_t written = 0;
    Clock read{};
  };

  Location& location(void* at, std::size_t bytes);
  std::uint32_t tick(int rank);
  bool hides_older(const Store& store, int rank, bool sequential) const;
  void acquire(int rank, const Store& store, std::memory_order order);
  View released_by(int rank, std::memory_order order) const;
  void access(int rank, const void* at, std::size_t bytes, bool writes);
  void split(std::uintptr_t at);
  void check(const Plain& plain, std::uintptr_t at, int rank, bool writes) const;

  std::function<std::size_t(std::size_t)> choose_;
  std::function<void(const std::string&)> fault_;
  std::array<Rank, kMaxRanks> ranks_;
  std::unordered_map<std::uintptr_t, Location> locations_;
  std::map<std::uintptr_t, Plain> plain_;  ///< By first byte.
  Clock fenced_{};                         ///< What happens before the last sequentially consistent fence.
  std::uint32_t ordered_ = 0;
  std::uint64_t stale_loads_ = 0;
};

}  // namespace ddpkit::schedules
