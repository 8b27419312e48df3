// Tier 0: the standard library only.
#pragma once

#include <atomic>
#include <mutex>
#include <set>
#include <vector>

#include "comm/shm/engine.h"

namespace ddpkit::shm {

/// The engines of this process.
class Engines {
 public:
  static Engines& all() {
    static auto* engines = new Engines;  // Never destroyed: groups may be destroyed until the program ends.
    return *engines;
  }
  void add(Engine* engine) {
    const std::lock_guard lock(mutex_);
    engines_.push_back(engine);
    count_groups();
  }
  void remove(Engine* engine) {
    const std::lock_guard lock(mutex_);
    std::erase(engines_, engine);
    count_groups();
  }
  /// Progresses the groups other than that of `self`. Returns whether one of them has operations in progress. Ranks of
  /// one group in this process are threads that make progress separately.
  bool progress_others(const Engine* self) {
    if (groups_.load(std::memory_order_relaxed) < 2) return false;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return true;
    bool busy = false;
    for (Engine* engine : engines_) busy |= engine->group() != self->group() && engine->progress_from_outside();
    return busy;
  }

 private:
  void count_groups() {
    std::set<const void*> groups;
    for (const Engine* engine : engines_) groups.insert(engine->group());
    groups_ = groups.size();
  }

  std::mutex mutex_;
  std::vector<Engine*> engines_;
  std::atomic<std::size_t> groups_ = 0;
};

}  // namespace ddpkit::shm
