// Tier 2: torch/nn/module.h.
#pragma once

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>

#include <cstdint>
#include <tuple>
#include <vector>

namespace clstm_ppo {

struct ModelOptions {
  std::int64_t state_size = 0;  ///< Numbers of a day's state.
  std::int64_t assets = 1;      ///< Numbers of an action.
  std::int64_t hidden = 64;     ///< Of each LSTM.
  double log_std = -0.5;        ///< Of the actions, to begin with.
};

/// Hidden and cell states of actor and critic, by which they remember an episode. All zeros where one begins.
struct Memory {
  at::Tensor actor_h, actor_c, critic_h, critic_c;  ///< [1, batch, hidden]
};
inline std::vector<at::Tensor> output_tensors(const Memory& m) {
  return {m.actor_h, m.actor_c, m.critic_h, m.critic_c};
}

/// The cascaded LSTM networks of J. Zou and others, arXiv 2212.02721: a first LSTM reads the window of states that ends
/// on the day and leaves its features; an LSTM actor and an LSTM critic read the features of day after day.
class CascadedLSTM : public torch::nn::Module {
 public:
  explicit CascadedLSTM(const ModelOptions& options);

  /// Mean of the actions [batch, steps, assets], value [batch, steps], logarithm of the actions' deviation [assets],
  /// and the memory behind the last step.
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, Memory>;

  /// `windows`: [batch, steps, window, state_size], normalised. `memory`: before the first step.
  Outputs forward(const at::Tensor& windows, const Memory& memory);

  /// Of `batch` episodes that begin.
  Memory no_memory(std::int64_t batch) const;

 private:
  std::int64_t hidden_;
  torch::nn::LSTM features_, actor_, critic_;
  torch::nn::Linear action_, value_;
  at::Tensor log_std_;
};

}  // namespace clstm_ppo
