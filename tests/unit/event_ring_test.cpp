#include <ddpkit/comm/process_group.h>
#include <ddpkit/comm/trace.h>
#include <ddpkit/launch/launcher.h>

#include <ATen/ops/ones.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "comm/call_log.h"
#include "comm/trace/event_ring.h"
#include "comm/trace/flight_view.h"
#include "support/catch.h"
#include "support/folder.h"

using ddpkit::Event;
using ddpkit::EventKind;
using ddpkit::EventPage;
using ddpkit::EventRing;
using ddpkit::FailureKind;
using ddpkit::FlightView;
using ddpkit::kEvents;

namespace {

constexpr const char* kName = "a rank's last collectives outlive it";

/// The ring of this process, and a second mapping of its page, as a launcher has.
struct WatchedRing {
  WatchedRing() {
    ::setenv(ddpkit::kEventPageVariable, std::to_string(view.descriptor()).c_str(), 1);
    REQUIRE(ring().is_read());
    void* memory = ::mmap(nullptr, sizeof(EventPage), PROT_READ | PROT_WRITE, MAP_SHARED, view.descriptor(), 0);
    REQUIRE(memory != MAP_FAILED);
    page = static_cast<EventPage*>(memory);
  }
  static EventRing& ring() { return EventRing::of_process(); }

  FlightView view;
  EventPage* page = nullptr;
};

/// All members depend on `number`.
Event numbered_call(std::uint64_t number) {
  return {.kind = static_cast<EventKind>(number % 13),
          .group = static_cast<std::uint32_t>(number % 1000),
          .sequence = number,
          .bytes = number * 3};
}

bool is_numbered(const Event& event) {
  const Event expected = numbered_call(event.sequence);
  return event.kind == expected.kind && event.group == expected.group && event.bytes == expected.bytes;
}

}  // namespace

TEST_CASE("a page that no process has taken is reported as unused", "[flight]") {
  const FlightView view;
  CHECK(view.state(false) == "has not come to init_process_group");
  CHECK(view.state(true).empty());
  CHECK(view.history().empty());
  CHECK(view.failure() == FailureKind::kNone);
  CHECK_FALSE(view.failed_rank().has_value());
}

TEST_CASE(kName, "[flight]") {
  // In a rank: writes a history that is longer than the page.
  if (std::getenv("DDPKIT_TEST_FLIGHT")) {
    const ddpkit::ProcessGroup group = ddpkit::init_process_group({.backend = "shm"});
    ddpkit::set_step(41);
    for (std::uint64_t i = 0; i < kEvents + 50; ++i) group.all_reduce(at::ones({1024}));
    std::_Exit(group.rank() == 1 ? 3 : 0);
  }
  const ddpkit::testing::Folder logs;
  const auto result = ddpkit::launch({.command = {"/proc/self/exe", "--in-process", kName},
                                      .ranks = 2,
                                      .environment = {{"DDPKIT_TEST_FLIGHT", "1"}},
                                      .time_limit = std::chrono::seconds(60),
                                      .on_output = [](int, const std::string&) {},
                                      .log_dir = logs.path().string()});
  REQUIRE(result.first_failure.has_value());
  CHECK(result.first_failure->rank == 1);
  CHECK_THAT(result.first_failure->state, ContainsSubstring("at step 41; its last one was all_reduce number"));
  CHECK_THAT(result.first_failure->state, ContainsSubstring("(4096 bytes, group 0)"));
  const std::string history = ddpkit::testing::read_file(logs.path() / "attempt_0" / "1" / "collectives.txt");
  CHECK(std::count(history.begin(), history.end(), '\n') == kEvents + 1);  // And the heading.
}

TEST_CASE("the first to be recorded of failures on several threads counts", "[flight]") {
  const WatchedRing watched;
  constexpr int kRounds = 2000;
  const std::vector<FailureKind> failures = {FailureKind::kPeerLost, FailureKind::kTimeout};
  std::barrier<> all_here(3);
  std::vector<std::thread> threads;
  for (int failed_rank = 0; failed_rank < 2; ++failed_rank)
    threads.emplace_back([&, failed_rank] {
      for (int round = 0; round < kRounds; ++round) {
        all_here.arrive_and_wait();
        watched.ring().fail(failures[static_cast<std::size_t>(failed_rank)], failed_rank);
        all_here.arrive_and_wait();
      }
    });
  int torn = 0, changed = 0;
  for (int round = 0; round < kRounds; ++round) {
    watched.page->outcome.store({});
    all_here.arrive_and_wait();
    all_here.arrive_and_wait();
    const int failed_rank = watched.view.failed_rank().value_or(-1);
    torn += failed_rank < 0 || watched.view.failure() != failures.at(static_cast<std::size_t>(failed_rank));
    watched.ring().fail(FailureKind::kMismatch, 2);
    changed += watched.view.failure() == FailureKind::kMismatch || watched.view.failed_rank() != failed_rank;
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(torn == 0);
  CHECK(changed == 0);
}

TEST_CASE("a concurrent reader never sees a torn event", "[flight]") {
  const WatchedRing watched;
  constexpr std::uint64_t kThreads = 3, kPerThread = 200 * kEvents;
  std::atomic<std::uint64_t> running = kThreads;
  std::vector<std::thread> writers;
  for (std::uint64_t thread = 0; thread < kThreads; ++thread)
    writers.emplace_back([&, thread] {
      for (std::uint64_t i = 0; i < kPerThread; ++i) {
        Event event = numbered_call(1 + kThreads * i + thread);
        watched.ring().finish(watched.ring().begin(event));
      }
      --running;
    });
  std::uint64_t read = 0, torn = 0;
  do {
    // The writers overwrite the oldest events.
    const std::uint64_t next = watched.page->next, oldest = next < kEvents ? 0 : next - kEvents;
    for (std::uint64_t index = oldest; index < std::min(oldest + 4, next); ++index) {
      const auto event = watched.page->read(index);
      read += event.has_value();
      torn += event && !is_numbered(*event);
    }
  } while (running != 0 || read == 0);
  for (std::thread& writer : writers) writer.join();
  CHECK(torn == 0);
  // One writer loses no event.
  for (std::uint64_t number = 1; number <= kEvents; ++number) {
    Event event = numbered_call(number);
    watched.ring().finish(watched.ring().begin(event));
  }
  for (std::uint64_t number = 1; number <= kEvents; ++number) {
    const auto event = watched.page->read(watched.page->next - kEvents + number - 1);
    REQUIRE(event.has_value());
    CHECK(event->sequence == number);
    CHECK(event->finished);
  }
  // Half of an event that a second writer has replaced.
  const std::uint64_t last = watched.page->next - 1;
  watched.page->slots[last % kEvents].bytes += 1;
  CHECK_FALSE(watched.page->read(last).has_value());
}

TEST_CASE("a rank's state names its calls, its history also its activities", "[flight]") {
  const WatchedRing watched;
  watched.ring().add({.kind = EventKind::kForward});
  CHECK(watched.view.state(true) == "had called no collective");
  Event call{.kind = EventKind::kAllReduce, .sequence = 3, .bytes = 8};
  watched.ring().finish(watched.ring().begin(call));
  watched.ring().add({.kind = EventKind::kBucketWait, .bucket = 2, .begin_ns = 5, .end_ns = 2'000'005});
  CHECK(watched.view.state(true) == "was in no collective; its last one was all_reduce number 3 (8 bytes, group 0)");
  CHECK_THAT(watched.view.history(), ContainsSubstring("  forward, 0.000 ms\n"));
  CHECK_THAT(watched.view.history(), ContainsSubstring("  wait for bucket 2, 2.000 ms\n"));
}

TEST_CASE("a call in progress is described correctly after the ring has overwritten it", "[flight]") {
  ddpkit::CallLog log;
  EventRing& ring = EventRing::of_process();
  Event call{.kind = EventKind::kBroadcast, .sequence = 7, .bytes = 64};
  const std::uint64_t index = ring.begin(call);
  log.add(index, call, [] { return false; });
  for (std::uint64_t i = 0; i < kEvents; ++i) {
    Event later{.kind = EventKind::kAllReduce, .sequence = 8 + i, .bytes = 4};
    ring.finish(ring.begin(later));
  }
  CHECK(log.state() == "is in broadcast number 7 (64 bytes, group 0)");
  CHECK(log.kind_of(0) == "broadcast/64");
}
