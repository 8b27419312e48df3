#include "strategy.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace ddpkit::schedules {

int next_ready(unsigned ready, int current) {
  const unsigned above = current < 0 ? ready : ready & ~((2U << current) - 1U);
  return std::countr_zero(above != 0 ? above : ready);
}

int InTurn::pick(unsigned ready, int current) {
  const bool continues = current >= 0 && (ready >> current & 1U) != 0;
  return continues ? current : next_ready(ready, current);
}

Random::Random(std::uint64_t seed, std::uint64_t points)
    : random_(seed),
      by_priority_(seed % 2 == 0),
      switch_every_(2 + random_() % 30),
      stale_percent_(random_() % 4 * 20) {
  std::iota(priority_.begin(), priority_.end(), kDepth);
  std::shuffle(priority_.begin(), priority_.end(), random_);
  for (auto& change : changes_) change = random_() % (points + 1);
}

int Random::pick(unsigned ready, int current) {
  ++point_;
  if (!by_priority_) {
    const bool continues = current >= 0 && (ready >> current & 1U) != 0;
    if (continues && random_() % switch_every_ != 0) return current;
    int rank = std::countr_zero(ready);
    for (auto skip = random_() % static_cast<unsigned>(std::popcount(ready)); skip > 0; --skip)
      rank = next_ready(ready, rank);
    return rank;
  }
  if (current >= 0) {
    auto& own = priority_[static_cast<std::size_t>(current)];
    for (std::size_t i = 0; i < changes_.size(); ++i) {
      if (changes_[i] == point_) own = static_cast<int>(i);
    }
  }
  int best = -1;
  for (int r = 0; r < kMaxRanks; ++r) {
    const bool is_ready = (ready >> r & 1U) != 0;
    if (is_ready && (best < 0 || priority_[static_cast<std::size_t>(r)] > priority_[static_cast<std::size_t>(best)]))
      best = r;
  }
  return best;
}

std::size_t Random::pick_store(std::size_t allowed) {
  return random_() % 100 < stale_percent_ ? random_() % allowed : 0;
}

bool Exhaustive::next() {
  at_ = 0;
  deviations_ = 0;
  if (!started_) return started_ = true;
  while (!path_.empty() && path_.back().taken + 1 == path_.back().options) path_.pop_back();
  if (path_.empty()) return false;
  ++path_.back().taken;
  return true;
}

std::size_t Exhaustive::choose(std::size_t options) {
  if (at_ == path_.size()) path_.push_back({0, deviations_ < bound_ ? options : 1});
  const std::size_t taken = path_[at_++].taken;
  if (taken != 0) ++deviations_;
  return taken;
}

int Exhaustive::pick(unsigned ready, int current) {
  int rank = InTurn().pick(ready, current);
  for (std::size_t skip = choose(static_cast<std::size_t>(std::popcount(ready))); skip > 0; --skip)
    rank = next_ready(ready, rank);
  return rank;
}

}  // namespace ddpkit::schedules
