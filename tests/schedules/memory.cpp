#include "memory.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

namespace ddpkit::schedules {
namespace {

/// A store becomes visible in finite time: after this number of consecutive loads that read an older store, a rank
/// reads the newest.
constexpr int kMostStale = 3;

bool is_sequential(std::memory_order order) { return order == std::memory_order_seq_cst; }
bool acquires(std::memory_order order) {
  return order != std::memory_order_relaxed && order != std::memory_order_release;
}
bool releases(std::memory_order order) {
  return order == std::memory_order_release || order == std::memory_order_acq_rel || is_sequential(order);
}

void join(Clock& clock, const Clock& other) {
  for (std::size_t r = 0; r < clock.size(); ++r) clock[r] = std::max(clock[r], other[r]);
}

template <class T>
T& object_at(void* at) {
  return *static_cast<T*>(at);
}

// The instrumentation would count memcpy() as an access of the rank (hooks.cpp).
std::uint64_t read_value(void* at, std::size_t bytes) {
  return bytes == 1   ? object_at<std::uint8_t>(at)
         : bytes == 2 ? object_at<std::uint16_t>(at)
         : bytes == 4 ? object_at<std::uint32_t>(at)
                      : object_at<std::uint64_t>(at);
}

/// Returns the value as stored in the object.
std::uint64_t write_value(void* at, std::size_t bytes, std::uint64_t value) {
  if (bytes == 1) return object_at<std::uint8_t>(at) = static_cast<std::uint8_t>(value);
  if (bytes == 2) return object_at<std::uint16_t>(at) = static_cast<std::uint16_t>(value);
  if (bytes == 4) return object_at<std::uint32_t>(at) = static_cast<std::uint32_t>(value);
  return object_at<std::uint64_t>(at) = value;
}

}  // namespace

void View::join(const View& other) {
  schedules::join(happened, other.happened);
  schedules::join(visible, other.visible);
  ordered = std::max(ordered, other.ordered);
}

Memory::Location& Memory::location(void* at, std::size_t bytes) {
  Location& location = locations_[reinterpret_cast<std::uintptr_t>(at)];
  const std::uint64_t value = read_value(at, bytes);
  if (location.history.empty()) {
    location.bytes = bytes;
    location.history.emplace_back();
    location.history.back().value = value;
  } else if (location.bytes != bytes || location.history.back().value != value) {
    fault_(fmt::format("an atomic object of {} bytes is {}, but its last store was {}: the simulation missed an access",
                       bytes, value, location.history.back().value));
  }
  return location;
}

/// Counts an operation of the rank and returns its time.
std::uint32_t Memory::tick(int rank) {
  View& view = ranks_[static_cast<std::size_t>(rank)].view;
  const std::uint32_t now = ++view.happened[static_cast<std::size_t>(rank)];
  view.visible[static_cast<std::size_t>(rank)] = now;
  return now;
}

/// Whether a load must not read anything older than `store`.
bool Memory::hides_older(const Store& store, int rank, bool sequential) const {
  const View& view = ranks_[static_cast<std::size_t>(rank)].view;
  for (std::size_t r = 0; r < store.seen.size(); ++r) {
    const std::uint32_t known = sequential ? std::max(view.visible[r], fenced_[r]) : view.visible[r];
    if (store.seen[r] != 0 && store.seen[r] <= known) return true;
  }
  return store.ordered != 0 && (sequential || store.ordered <= view.ordered);
}

void Memory::acquire(int rank, const Store& store, std::memory_order order) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  (acquires(order) ? self.view : self.acquired).join(store.released);
}

View Memory::released_by(int rank, std::memory_order order) const {
  const Rank& self = ranks_[static_cast<std::size_t>(rank)];
  return releases(order) ? self.view : self.fenced;
}

std::uint64_t Memory::load(int rank, void* at, std::size_t bytes, std::memory_order order) {
  Location& object = location(at, bytes);
  const std::uint32_t now = tick(rank);
  const auto self = static_cast<std::size_t>(rank);
  const bool sequential = is_sequential(order);
  std::vector<Store>& history = object.history;
  std::size_t allowed = 1;
  while (allowed < history.size() && !hides_older(history[history.size() - allowed], rank, sequential)) ++allowed;
  std::size_t age = 0;
  if (allowed > 1 && object.stale[self] < kMostStale) age = choose_(allowed);
  object.stale[self] = age == 0 ? 0 : object.stale[self] + 1;
  if (age != 0) ++stale_loads_;
  Store& store = history[history.size() - 1 - age];
  if (store.seen[self] == 0) store.seen[self] = now;
  if (sequential && store.ordered == 0 && store.writer != rank) store.ordered = ++ordered_;
  acquire(rank, store, order);
  return store.value;
}

void Memory::store(int rank, void* at, std::size_t bytes, std::uint64_t value, std::memory_order order) {
  Location& object = location(at, bytes);
  const std::uint32_t now = tick(rank);
  Store store;
  store.value = write_value(at, bytes, value);
  store.released = released_by(rank, order);
  store.seen[static_cast<std::size_t>(rank)] = now;
  store.writer = rank;
  if (is_sequential(order)) store.ordered = ++ordered_;
  object.history.push_back(store);
  tick(rank);  // Later plain accesses are not released.
}

std::uint64_t Memory::modify(int rank, void* at, std::size_t bytes, std::memory_order order,
                             const std::function<std::uint64_t(std::uint64_t)>& change) {
  Location& object = location(at, bytes);
  const std::uint32_t now = tick(rank);
  const Store before = object.history.back();
  acquire(rank, before, order);
  Store store;
  store.value = write_value(at, bytes, change(before.value));
  store.released = released_by(rank, order);
  store.released.join(before.released);  // The release sequence continues.
  store.seen[static_cast<std::size_t>(rank)] = now;
  store.writer = rank;
  if (is_sequential(order)) store.ordered = ++ordered_;
  object.history.push_back(store);
  object.stale[static_cast<std::size_t>(rank)] = 0;
  tick(rank);
  return before.value;
}

void Memory::fence(int rank, std::memory_order order) {
  tick(rank);
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  if (acquires(order)) self.view.join(self.acquired);
  if (is_sequential(order)) {
    join(self.view.visible, fenced_);
    join(fenced_, self.view.happened);
    self.view.ordered = ordered_;
  }
  if (releases(order)) self.fenced = self.view;
  tick(rank);
}

void Memory::synchronize() {
  View all;
  for (const Rank& rank : ranks_) all.join(rank.view);
  all.ordered = ordered_;
  for (Rank& rank : ranks_) rank.view = all;
  for (int r = 0; r < kMaxRanks; ++r) tick(r);
}

void Memory::clear() {
  for (const auto& [at, object] : locations_) std::memset(reinterpret_cast<void*>(at), 0, object.bytes);
  for (const auto& [at, plain] : plain_) std::memset(reinterpret_cast<void*>(at), 0, plain.end - at);
}

void Memory::split(std::uintptr_t at) {
  auto after = plain_.lower_bound(at);
  if (after == plain_.begin()) return;
  auto& [begin, before] = *std::prev(after);
  if (before.end <= at || begin == at) return;
  plain_.emplace_hint(after, at, before);
  before.end = at;
}

void Memory::check(const Plain& plain, std::uintptr_t at, int rank, bool writes) const {
  const Clock& happened = ranks_[static_cast<std::size_t>(rank)].view.happened;
  const char* action = writes ? "writes" : "reads";
  if (plain.writer >= 0 && plain.written > happened[static_cast<std::size_t>(plain.writer)])
    fault_(fmt::format("data race: rank {} {} {:#x}, which rank {} has written without an order between the two", rank,
                       action, at, plain.writer));
  for (int r = 0; writes && r < kMaxRanks; ++r) {
    if (plain.read[static_cast<std::size_t>(r)] > happened[static_cast<std::size_t>(r)])
      fault_(fmt::format("data race: rank {} writes {:#x}, which rank {} has read without an order between the two",
                         rank, at, r));
  }
}

void Memory::access(int rank, const void* where, std::size_t bytes, bool writes) {
  if (bytes == 0) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(where);
  const std::uintptr_t end = begin + bytes;
  const auto self = static_cast<std::size_t>(rank);
  const std::uint32_t now = ranks_[self].view.happened[self];
  split(begin);
  split(end);
  auto next = plain_.lower_bound(begin);
  if (writes) {
    while (next != plain_.end() && next->first < end) {
      check(next->second, next->first, rank, true);
      next = plain_.erase(next);
    }
    plain_.emplace_hint(next, begin, Plain{.end = end, .writer = rank, .written = now, .read = {}});
    return;
  }
  for (std::uintptr_t at = begin; at < end; at = next->second.end, ++next) {
    if (next == plain_.end() || next->first > at) {
      const std::uintptr_t gap_end = next == plain_.end() ? end : std::min(end, next->first);
      next = plain_.emplace_hint(next, at, Plain{.end = gap_end, .writer = -1, .written = 0, .read = {}});
    }
    check(next->second, at, rank, false);
    next->second.read[self] = now;
  }
}

}  // namespace ddpkit::schedules
