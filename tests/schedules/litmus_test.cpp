// Tests the simulated memory: the results that it allows and forbids.
#include <atomic>
#include <set>
#include <string>

#include "simulation.h"
#include "support/catch.h"

using namespace ddpkit::schedules;

namespace {

struct Shared {
  std::atomic<std::uint64_t> x{0}, y{0};
  std::atomic<std::uint32_t> wake_word{0};
  std::uint64_t data = 0;
};

/// Returns the results and faults of all schedules with at most two preemptions or stale loads.
std::set<std::string> results_of(const std::function<void(Shared&, int rank, std::string& result)>& body) {
  std::set<std::string> results;
  Exhaustive exhaustive(2);
  while (exhaustive.next()) {
    auto* shared = new (Arena::instance().take(sizeof(Shared))) Shared;
    std::string result[2];
    Simulation* running = nullptr;
    Simulation simulation({.ranks = 2, .strategy = &exhaustive}, [&](int rank) {
      running->start();
      body(*shared, rank, result[rank]);
    });
    running = &simulation;
    const std::string fault = simulation.run();
    results.insert(fault.empty() ? result[0] + result[1] : fault.substr(fault.find(": ") + 2, 9));
    simulation.memory().clear();
    Arena::instance().reset();
  }
  return results;
}

using Results = std::set<std::string>;
constexpr auto kRelaxed = std::memory_order_relaxed;

}  // namespace

TEST_CASE("simulated memory: stores pass loads unless fences keep them", "[schedules]") {
  for (const bool fences : {false, true}) {
    const Results results = results_of([&](Shared& shared, int rank, std::string& result) {
      auto& own = rank == 0 ? shared.x : shared.y;
      auto& other = rank == 0 ? shared.y : shared.x;
      own.store(1, std::memory_order_release);
      if (fences) std::atomic_thread_fence(std::memory_order_seq_cst);
      result = std::to_string(other.load(std::memory_order_acquire));
    });
    CHECK(results == (fences ? Results{"01", "10", "11"} : Results{"00", "01", "10", "11"}));
  }
}

TEST_CASE("simulated memory: sequentially consistent operations have one order", "[schedules]") {
  CHECK(results_of([](Shared& shared, int rank, std::string& result) {
          (rank == 0 ? shared.x : shared.y) = 1;
          result = std::to_string((rank == 0 ? shared.y : shared.x).load());
        }) == Results{"01", "10", "11"});
}

TEST_CASE("simulated memory: plain data needs a release and an acquire", "[schedules]") {
  for (const auto store : {kRelaxed, std::memory_order_release}) {
    for (const auto load : {kRelaxed, std::memory_order_acquire}) {
      const Results results = results_of([&](Shared& shared, int rank, std::string& result) {
        if (rank == 0) {
          shared.data = 7;
          shared.x.store(1, store);
        } else if (shared.x.load(load) == 1) {
          result = std::to_string(shared.data);
        }
      });
      const bool ordered = store != kRelaxed && load != kRelaxed;
      CHECK(results == (ordered ? Results{"", "7"} : Results{"", "data race"}));
    }
  }
}

TEST_CASE("simulated memory: a fence gives relaxed operations an order", "[schedules]") {
  CHECK(results_of([](Shared& shared, int rank, std::string& result) {
          if (rank == 0) {
            shared.data = 7;
            std::atomic_thread_fence(std::memory_order_release);
            shared.x.store(1, kRelaxed);
          } else if (shared.x.load(kRelaxed) == 1) {
            std::atomic_thread_fence(std::memory_order_acquire);
            result = std::to_string(shared.data);
          }
        }) == Results{"", "7"});
}

TEST_CASE("simulated memory: a rank reads nothing older than before, another object may be older", "[schedules]") {
  CHECK(results_of([](Shared& shared, int rank, std::string& result) {
          if (rank == 0) {
            shared.x.store(1, kRelaxed);
            shared.y.store(1, kRelaxed);
          } else {
            const auto y = shared.y.load(kRelaxed), x = shared.x.load(kRelaxed), again = shared.x.load(kRelaxed);
            result = std::to_string(y) + std::to_string(x) + std::to_string(again);
          }
        }) == Results{"000", "001", "011", "100", "101", "111"});
}

TEST_CASE("simulated memory: an addition reads the newest value", "[schedules]") {
  CHECK(results_of([](Shared& shared, int, std::string& result) {
          result = std::to_string(shared.x.fetch_add(1, kRelaxed));
        }) == Results{"01", "10"});
}
