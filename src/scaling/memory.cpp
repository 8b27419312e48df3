#include <ddpkit/scaling/memory.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include <fmt/format.h>

namespace ddpkit::scaling {

RankMemory fully_sharded_memory(const ShardedModelSize& model, int ranks) {
  if (ranks < 1) throw std::invalid_argument(fmt::format("{} ranks", ranks));
  if (model.prefetch < 0) throw std::invalid_argument(fmt::format("{} units are gathered ahead", model.prefetch));
  for (const double value :
       {model.parameter_bytes, model.unit_bytes, model.root_bytes, model.optimizer_states, model.gathered_fraction}) {
    if (!std::isfinite(value) || value < 0)
      throw std::invalid_argument(fmt::format("a size of the sharded model is {}", value));
  }
  const double shard = model.parameter_bytes / ranks;
  const double units = std::max(0.0, model.parameter_bytes - model.root_bytes);  // A small model has few units.
  const auto whole = [&](double count) {
    return model.gathered_fraction * (std::min(count * model.unit_bytes, units) + model.root_bytes);
  };
  return {.weights = shard,
          .gradients = shard,
          .optimizer = model.optimizer_states * shard,
          .whole_units = whole(1 + model.prefetch),
          .gradients_in_progress = whole(2)};
}

}  // namespace ddpkit::scaling
