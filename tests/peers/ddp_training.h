// The models that ddp_training.cpp trains. ddp_training.py has the same models with the same parameter names.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/parallel/fully_sharded_data_parallel.h>

namespace ddpkit::testing {

class PeerModel : public torch::nn::Module {
 public:
  /// Returns logits, one row per prediction.
  virtual torch::Tensor forward(const torch::Tensor& x) = 0;
  /// Called before each step, for models whose forward depends on it.
  virtual void begin_step([[maybe_unused]] int step, [[maybe_unused]] int rank) {}
};

struct PeerCase {
  std::function<std::shared_ptr<PeerModel>(const ProcessGroup& group)> make;
  DistributedDataParallelOptions options = {};
  std::function<CommHook(const ProcessGroup& group)> hook = nullptr;
  std::optional<FullyShardedOptions> fully_sharded = std::nullopt;  ///< Instead of `options`.
};

/// Returns all cases by name; sources add theirs before main().
std::map<std::string, PeerCase>& peer_cases();

template <class Model>
std::shared_ptr<PeerModel> make_peer_model(const ProcessGroup&) {
  return std::make_shared<Model>();
}

}  // namespace ddpkit::testing
