#include "virtual_gpu/cudart/order.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>

#include "virtual_gpu/cudart/memory.h"
#include "virtual_gpu/cudart/stream.h"

namespace vgpu {
namespace {

struct Point {
  std::uint32_t stream = 0;  ///< Number. 0: none.
  std::uint64_t task = 0;
  const std::string* what = nullptr;
};

/// The last tasks that accessed an interval. Key of the map: its begin.
struct Interval {
  std::uintptr_t end = 0;
  Point writer = {};
  std::vector<Point> readers = {};  ///< Since the last write, one per stream.
};

struct Order {
  std::mutex mutex;
  Clock host, polled;
  std::vector<Clock> streams;  ///< [number]
  std::map<std::uintptr_t, Interval> memory;
  std::set<std::string> names;
};

Order& order() {
  static auto* all = new Order;
  return *all;
}

void join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

/// Call with the lock held.
Clock& clock_of_number(std::uint32_t number) {
  auto& streams = order().streams;
  if (streams.size() <= number) streams.resize(number + 1);
  if (streams[number].size() <= number) streams[number].resize(number + 1);
  return streams[number];
}

/// Cuts the interval that contains the address, if there is one, so that an interval begins there.
void cut(std::uintptr_t address) {
  auto& memory = order().memory;
  auto next = memory.lower_bound(address);
  if (next == memory.begin()) return;
  Interval& before = std::prev(next)->second;
  if (before.end <= address) return;
  memory.emplace_hint(next, address, before);
  before.end = address;
}

void require(const Clock& clock, const Point& before, bool wrote, const Point& now, const Access& access) {
  if (before.stream == 0 || (before.stream < clock.size() && clock[before.stream] >= before.task)) return;
  static const char* const mode = std::getenv("VGPU_ORDER");
  if (mode && std::strcmp(mode, "ignore") == 0) return;
  std::fprintf(stderr,
               "virtual GPU: %s on stream %u %s %zu bytes at %p, which %s on stream %u %s: no event orders the two\n",
               now.what->c_str(), now.stream, access.writes ? "writes" : "reads", access.bytes, access.begin,
               before.what->c_str(), before.stream, wrote ? "writes" : "reads");
  if (!mode || std::strcmp(mode, "print") != 0) std::abort();
}

void write(const Clock& clock, const Point& now, std::uintptr_t begin, const Access& access) {
  auto& memory = order().memory;
  const std::uintptr_t end = begin + access.bytes;
  auto at = memory.lower_bound(begin);
  while (at != memory.end() && at->first < end) {
    require(clock, at->second.writer, true, now, access);
    for (const Point& reader : at->second.readers) require(clock, reader, false, now, access);
    at = memory.erase(at);
  }
  memory.emplace_hint(at, begin, Interval{.end = end, .writer = now});
}

void read(const Clock& clock, const Point& now, std::uintptr_t begin, const Access& access) {
  auto& memory = order().memory;
  const std::uintptr_t end = begin + access.bytes;
  std::uintptr_t next = begin;
  for (auto at = memory.lower_bound(begin); next < end; ++at) {
    if (at == memory.end() || at->first > next) {  // Memory without an access so far.
      const std::uintptr_t gap_end = at == memory.end() ? end : std::min(end, at->first);
      at = memory.emplace_hint(at, next, Interval{.end = gap_end});
    }
    Interval& interval = at->second;
    require(clock, interval.writer, true, now, access);
    std::erase_if(interval.readers, [&](const Point& reader) { return reader.stream == now.stream; });
    interval.readers.push_back(now);
    next = interval.end;
  }
}

}  // namespace

Clock clock_of(const Stream& stream) {
  const std::lock_guard lock(order().mutex);
  return clock_of_number(stream.number());
}

void stream_follows(const Stream& stream, const Clock& tasks) {
  const std::lock_guard lock(order().mutex);
  join(clock_of_number(stream.number()), tasks);
}

void host_follows(const Clock& tasks) {
  const std::lock_guard lock(order().mutex);
  join(order().host, tasks);
}

void host_has_polled(const Clock& tasks) {
  const std::lock_guard lock(order().mutex);
  join(order().polled, tasks);
}

void check_task(const Stream& stream, const std::string& what, const std::vector<Access>& accesses,
                bool is_allocation) {
  const std::lock_guard lock(order().mutex);
  Clock& clock = clock_of_number(stream.number());
  join(clock, order().host);
  const Point now{stream.number(), ++clock[stream.number()], &*order().names.insert(what).first};
  Clock known = clock;
  if (is_allocation) join(known, order().polled);
  for (const Access& access : accesses) {
    if (access.bytes == 0 || !is_device_address(access.begin)) continue;
    const auto begin = reinterpret_cast<std::uintptr_t>(access.begin);
    cut(begin);
    cut(begin + access.bytes);
    access.writes ? write(known, now, begin, access) : read(known, now, begin, access);
  }
}

void forget_accesses(const void* begin, std::size_t bytes) {
  const std::lock_guard lock(order().mutex);
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  cut(address);
  cut(address + bytes);
  auto& memory = order().memory;
  memory.erase(memory.lower_bound(address), memory.lower_bound(address + bytes));
}

}  // namespace vgpu
