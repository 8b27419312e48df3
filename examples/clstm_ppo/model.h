// Tier 2: torch/nn/module.h.
#pragma once

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>

#include <cstdint>
#include <tuple>
#include <vector>

namespace clstm_ppo {

struct ModelOptions {
  std::int64_t state_size = 0;  ///< Size of a day's state.
  std::int64_t assets = 1;      ///< Size of an action.
  std::int64_t hidden = 64;     ///< Hidden size of each LSTM.
  double log_std = -0.5;        ///< Initial logarithm of the actions' standard deviation.
};

/// Hidden and cell states of actor and critic within an episode. All zeros at its beginning.
struct Memory {
  at::Tensor actor_h, actor_c, critic_h, critic_c;  ///< [1, batch, hidden]
};
inline std::vector<at::Tensor> output_tensors(const Memory& m) {
  return {m.actor_h, m.actor_c, m.critic_h, m.critic_c};
}

/// The cascaded LSTM networks of J. Zou and others, arXiv 2212.02721. A first LSTM computes features of the window of
/// states that ends on the day. An LSTM actor and an LSTM critic process the sequence of features.
class CascadedLSTM : public torch::nn::Module {
 public:
  explicit CascadedLSTM(const ModelOptions& options);

  /// Mean of the actions [batch, steps, assets], value [batch, steps], logarithm of the actions' standard deviation
  /// [assets], and the memory after the last step.
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, Memory>;

  /// `windows`: [batch, steps, window, state_size], normalised. `memory`: before the first step.
  Outputs forward(const at::Tensor& windows, const Memory& memory);

  /// Returns the initial memory of `batch` episodes.
  Memory no_memory(std::int64_t batch) const;

 private:
  std::int64_t hidden_;
  torch::nn::LSTM features_, actor_, critic_;
  torch::nn::Linear action_, value_;
  at::Tensor log_std_;
};

}  // namespace clstm_ppo
