#include <ddpkit/data/prefetcher.h>

#include <atomic>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include <ddpkit/error.h>

#include "support/catch.h"

using ddpkit::Prefetcher;

TEST_CASE("batches come in order whatever the number of workers", "[prefetcher]") {
  for (const int workers : {0, 1, 3}) {
    CAPTURE(workers);
    std::atomic<int> calls = 0;
    Prefetcher<std::vector<std::int64_t>> batches(
        50,
        [&](std::int64_t index) {
          ++calls;
          // Later batches are faster.
          std::this_thread::sleep_for(std::chrono::microseconds(50 * (index % 5)));
          return std::vector<std::int64_t>{index, 2 * index};
        },
        {.num_workers = workers});
    for (std::int64_t i = 0; i < 50; ++i) CHECK(batches.next() == std::vector<std::int64_t>{i, 2 * i});
    CHECK_FALSE(batches.next());
    CHECK_FALSE(batches.next());
    CHECK(calls == 50);
    CHECK(batches.stats().batches == 50);
    CHECK(batches.stats().make_seconds > 0);
  }
}

TEST_CASE("workers are at most prefetch_factor batches ahead", "[prefetcher]") {
  std::atomic<int> calls = 0;
  Prefetcher<int> batches(100, [&](std::int64_t) { return ++calls; }, {.num_workers = 2, .prefetch_factor = 3});
  for (int taken = 0; taken < 20; ++taken) {
    // Waits until the workers stop.
    while (calls < taken + 6) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    CHECK(calls <= taken + 6);
    CHECK(batches.next());
  }
}

TEST_CASE("an exception is thrown instead of its batch", "[prefetcher]") {
  for (const int workers : {0, 2}) {
    CAPTURE(workers);
    Prefetcher<std::int64_t> batches(6,
                                     [&](std::int64_t index) {
                                       if (index == 3) throw std::runtime_error("batch 3 is torn");
                                       return index;
                                     },
                                     {.num_workers = workers});
    for (std::int64_t i = 0; i < 3; ++i) CHECK(batches.next() == i);
    CHECK_THROWS_WITH(batches.next(), "batch 3 is torn");
    CHECK(batches.next() == 4);
    CHECK(batches.next() == 5);
    CHECK_FALSE(batches.next());
  }
}

TEST_CASE("a prefetcher ends in the middle of its work", "[prefetcher]") {
  std::atomic<bool> gone = false, was_late = false;  // Catch2's macros are not thread-safe.
  for (int i = 0; i < 20; ++i) {
    Prefetcher<int> batches(1000,
                            [&](std::int64_t) {
                              std::this_thread::sleep_for(std::chrono::microseconds(200));
                              if (gone) was_late = true;
                              return 1;
                            },
                            {.num_workers = 3});
    if (i % 2 == 0) batches.next();
  }
  gone = true;
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK_FALSE(was_late.load());
}

TEST_CASE("prefetchers with impossible options are refused", "[prefetcher]") {
  const auto make = [](std::int64_t) { return 0; };
  CHECK_THROWS_AS(Prefetcher<int>(-1, make), ddpkit::InvalidArgument);
  CHECK_THROWS_AS(Prefetcher<int>(1, make, {.num_workers = -1}), ddpkit::InvalidArgument);
  CHECK_THROWS_AS(Prefetcher<int>(1, make, {.num_workers = 1, .prefetch_factor = 0}), ddpkit::InvalidArgument);
  CHECK_FALSE(Prefetcher<int>(0, make, {.num_workers = 2}).next());
}
