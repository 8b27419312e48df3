// Ranks as fibers of one thread, of which one runs at a time, with simulated memory, time and futexes.
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
  /// Zeroes, on a page boundary.
  std::byte* take(std::size_t bytes);
  /// Takes all memory back, which the caller has cleared.
  void reset() { used_ = 0; }

 private:
  static constexpr std::size_t kBytes = std::size_t{64} << 20;
  Arena();
  std::byte* begin_;
  std::size_t used_ = 0;
};

/// A rank that ends at some point, as by SIGKILL.
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
    bool naps_expire = false;  ///< A futex wait that only its timeout ends is no fault.
  };
  Simulation(const Options& options, std::function<void(int rank)> body);
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  /// The running simulation while one of its ranks runs; null otherwise.
  static Simulation* current();

  /// Runs every rank to its end; the first fault, empty if there is none.
  std::string run();

  // Called by ranks.
  int rank() const { return running_; }
  Memory& memory() { return memory_; }
  /// Waits until all ranks are here. Before it, ranks run in turn and loads read the newest store.
  void start();
  /// Another rank may run now.
  void point();
  void sleep(std::int64_t nanoseconds);
  /// False when the time limit ended the wait.
  bool wait(const std::uint32_t* word, std::uint32_t seen, std::int64_t nanoseconds);
  void wake(const std::uint32_t* word);
  std::int64_t now();
  [[noreturn]] void fail(const std::string& text);

  bool is_dead(int rank) const { return ranks_[static_cast<std::size_t>(rank)].state == State::kDead; }
  /// Points of a rank since start(). [rank]
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
    std::array<void*, 2> exceptions{};  ///< The C++ runtime's, of a thread.
  };

  static void enter();
  Rank& self() { return ranks_[static_cast<std::size_t>(running_)]; }
  unsigned ready() const;
  int decide();
  /// The running rank gives control to another one, and later continues.
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
  int last_ = -1;  ///< Has run last.
  int next_ = -1;  ///< Chosen by a rank before it gave up control.
  std::int64_t time_ = 1;
  std::uint64_t steps_ = 0;
  std::uint64_t switches_ = 0;
  std::string fault_;
};

}  // namespace ddpkit::schedules
