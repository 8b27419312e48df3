// Tier 0: the standard library only. The order in which a model uses its units.
#pragma once

#include <cstddef>
#include <map>
#include <utility>
#include <vector>

namespace ddpkit {

/// Predicts which units follow. The unit that followed the same two units the last time is expected again. A pair
/// differs between forward and backward. After a change of the order, only the first predictions are wrong. The result
/// depends on the calls only, so it is equal on ranks that use the same units in the same order.
class UnitOrder {
 public:
  /// Call before each forward pass: it does not depend on the pass before.
  void begin_pass() { last_ = {kNone, kNone}; }
  /// Call when another unit than the last one is used.
  void note(std::size_t unit) {
    next_[last_] = unit;
    last_ = {last_.second, unit};
  }
  /// Returns up to `count` units that are expected after the last one, the first use first.
  std::vector<std::size_t> predict(std::size_t count) const {
    std::vector<std::size_t> units;
    for (Pair last = last_; units.size() < count;) {
      const auto found = next_.find(last);
      if (found == next_.end()) break;
      units.push_back(found->second);
      last = {last.second, found->second};
    }
    return units;
  }

 private:
  using Pair = std::pair<std::size_t, std::size_t>;
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  std::map<Pair, std::size_t> next_;  ///< By the last two units.
  Pair last_ = {kNone, kNone};
};

}  // namespace ddpkit
