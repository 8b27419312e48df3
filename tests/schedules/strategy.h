// Strategies that choose the next rank to run and the store that a load reads.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <vector>

#include "memory.h"

namespace ddpkit::schedules {

class Strategy {
 public:
  virtual ~Strategy() = default;
  /// Returns the next rank to run: a bit of `ready`. `current` ran last and can continue if its bit is set; -1: none.
  virtual int pick(unsigned ready, int current) = 0;
  /// Returns which of `allowed` stores a load reads; 0 is the newest.
  virtual std::size_t pick_store(std::size_t allowed) = 0;
};

/// Returns the next bit of `ready` after `current`, cyclically.
int next_ready(unsigned ready, int current);

/// Each rank runs until it waits.
class InTurn : public Strategy {
 public:
  int pick(unsigned ready, int current) override;
  std::size_t pick_store(std::size_t) override { return 0; }
};

/// Random schedules. Even seeds: probabilistic concurrency testing (Burckhardt et al., 2010) of depth 3: ranks have
/// random priorities, which change at two random points. Odd seeds: a random switch every few points.
class Random : public Strategy {
 public:
  /// `points`: approximate number of points of a schedule.
  Random(std::uint64_t seed, std::uint64_t points);
  int pick(unsigned ready, int current) override;
  std::size_t pick_store(std::size_t allowed) override;

 private:
  static constexpr int kDepth = 3;
  std::mt19937_64 random_;
  bool by_priority_;
  std::uint64_t switch_every_;
  std::uint64_t stale_percent_;
  std::uint64_t point_ = 0;
  std::array<int, kMaxRanks> priority_{};
  std::array<std::uint64_t, kDepth - 1> changes_{};
};

/// All schedules with at most `bound` deviations from InTurn: a preemption, or a load of an older store.
class Exhaustive : public Strategy {
 public:
  explicit Exhaustive(int bound) : bound_(bound) {}
  /// Prepares the next schedule. Returns false after the last.
  bool next();
  int pick(unsigned ready, int current) override;
  std::size_t pick_store(std::size_t allowed) override { return choose(allowed); }

 private:
  struct Choice {
    std::size_t taken = 0;
    std::size_t options = 1;
  };
  /// Returns a choice below `options`; 0 is the choice of InTurn.
  std::size_t choose(std::size_t options);

  int bound_;
  std::vector<Choice> path_;
  std::size_t at_ = 0;
  int deviations_ = 0;
  bool started_ = false;
};

}  // namespace ddpkit::schedules
