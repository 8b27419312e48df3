// Ranks as fibers of one thread, with simulated memory, time and futexes. One fiber runs at a time.
#pragma once

#include <ucontext.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memory.h"
#include "strategy.h"

namespace ddpkit::schedules {

/// Memory that the ranks share. Only accesses to it are simulated.
class Arena {
 public:
  static Arena& instance();
  bool contains(const void* at) const {
    return reinterpret_cast<std::uintptr_t>(at) - reinterpret_cast<std::uintptr_t>(begin_) < kBytes;
  }
  /// Returns zeroed bytes on a page boundary.
  std::byte* take(std::size_t bytes);
  /// Frees all memory. The caller has cleared it.
  void reset() { used_ = 0; }

 private:
  static constexpr std::size_t kBytes = std::size_t{64} << 20;
  Arena();
  std::byte* begin_;
  std::size_t used_ = 0;
};

/// A rank that ends at a given point, as by SIGKILL.
struct Death {
  int rank = -1;
  std::uint64_t point = 0;  ///< Of this rank, counted from start().
};

class Simulation {
 public:
  struct Options {
    int ranks = 2;
    Strategy* strategy = nullptr;
    std::optional<Death> death = {};
    bool naps_expire = false;  ///< A futex wait that ends only by its timeout is no fault.
    bool membarrier = true;    ///< The kernel supports membarrier(2).
  };
  Simulation(const Options& options, std::function<void(int rank)> body);
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  /// Returns the running simulation while one of its ranks runs; null otherwise.
  static Simulation* current();

  /// Runs every rank to its end. Returns the first fault; empty if there is none.
  std::string run();

  // Called by ranks.
  int rank() const { return running_; }
  Memory& memory() { return memory_; }
  /// Waits until all ranks have called it. Before, ranks run in turn and loads read the newest store.
  void start();
  /// Allows another rank to run.
  void point();
  void sleep(std::int64_t nanoseconds);
  /// Returns false if the time limit ended the wait.
  bool wait(const std::uint32_t* word, std::uint32_t seen, std::int64_t nanoseconds);
  void wake(const std::uint32_t* word);
  /// membarrier(2). Returns -1 without Options::membarrier.
  long barrier_on_all(long command);
  std::int64_t now();
  [[noreturn]] void fail(const std::string& text);

  bool is_dead(int rank) const { return ranks_[static_cast<std::size_t>(rank)].state == State::kDead; }
  /// Returns a rank's number of points since start(). [rank]
  std::uint64_t points(int rank) const { return ranks_[static_cast<std::size_t>(rank)].points; }
  std::uint64_t switches() const { return switches_; }

 private:
  enum class State { kReady, kAtStart, kSleeping, kWaiting, kFinished, kDead };
  struct Rank {
    ucontext_t context{};
    std::unique_ptr<char[]> stack;
    State state = State::kReady;
    const std::uint32_t* word = nullptr;
    std::int64_t deadline = 0;
    bool timed_out = false;
    std::uint64_t points = 0;
    std::array<void*, 2> exceptions{};  ///< The C++ runtime's exception state of a thread.
  };

  static void enter();
  Rank& self() { return ranks_[static_cast<std::size_t>(running_)]; }
  unsigned ready() const;
  int decide();
  /// Passes control to another rank; returns when this rank runs again.
  void leave(State state);
  void resume(int rank);
  bool pass_time();

  Options options_;
  std::function<void(int)> body_;
  Memory memory_;
  std::vector<Rank> ranks_;
  ucontext_t main_{};
  InTurn in_turn_;
  bool started_ = false;
  int running_ = -1;
  int last_ = -1;  ///< The rank that ran last.
  int next_ = -1;  ///< The next rank, chosen before the running rank yielded.
  std::int64_t time_ = 1;
  std::uint64_t steps_ = 0;
  std::uint64_t switches_ = 0;
  std::string fault_;
};

}  // namespace ddpkit::schedules
