#include "clstm_ppo/model.h"

#include <torch/torch.h>

#include <cmath>

namespace clstm_ppo {
namespace {

torch::nn::LSTM lstm(std::int64_t inputs, std::int64_t hidden) {
  return torch::nn::LSTM(torch::nn::LSTMOptions(inputs, hidden).batch_first(true));
}

void orthogonal(torch::nn::Linear& layer, double gain) {
  torch::nn::init::orthogonal_(layer->weight, gain);
  torch::nn::init::zeros_(layer->bias);
}

}  // namespace

CascadedLSTM::CascadedLSTM(const ModelOptions& options)
    : hidden_(options.hidden),
      features_(register_module("features", lstm(options.state_size, options.hidden))),
      actor_(register_module("actor", lstm(options.hidden, options.hidden))),
      critic_(register_module("critic", lstm(options.hidden, options.hidden))),
      action_(register_module("action", torch::nn::Linear(options.hidden, options.assets))),
      value_(register_module("value", torch::nn::Linear(options.hidden, 1))),
      log_std_(register_parameter("log_std", torch::full({options.assets}, options.log_std))) {
  // Initial actions are near 0 (M. Andrychowicz and others, arXiv 2006.05990, section 3.2).
  orthogonal(action_, 0.01);
  orthogonal(value_, 1);
}

CascadedLSTM::Outputs CascadedLSTM::forward(const at::Tensor& windows, const Memory& memory) {
  const std::int64_t batch = windows.size(0), steps = windows.size(1);
  // The LSTM processes each window separately. Its last output is the day's features.
  const auto [read, unused] = features_(windows.flatten(0, 1));
  const at::Tensor features = read.select(1, -1).view({batch, steps, hidden_});
  const auto [acted, actor] = actor_(features, std::tuple(memory.actor_h, memory.actor_c));
  const auto [judged, critic] = critic_(features, std::tuple(memory.critic_h, memory.critic_c));
  return {action_(acted), value_(judged).squeeze(-1), log_std_,
          Memory{std::get<0>(actor), std::get<1>(actor), std::get<0>(critic), std::get<1>(critic)}};
}

Memory CascadedLSTM::no_memory(std::int64_t batch) const {
  const auto zeros = [&] { return torch::zeros({1, batch, hidden_}, log_std_.options().requires_grad(false)); };
  return {zeros(), zeros(), zeros(), zeros()};
}

}  // namespace clstm_ppo
