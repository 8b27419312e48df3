#include "clstm_ppo/ppo.h"

#include <torch/torch.h>

#include <cmath>
#include <numbers>

#include <ddpkit/train/metrics.h>

namespace clstm_ppo {

at::Tensor advantages_of(const at::Tensor& rewards, const at::Tensor& values, double gamma, double lambda) {
  const std::int64_t steps = rewards.size(1);
  const at::Tensor errors = rewards + gamma * values.slice(1, 1) - values.slice(1, 0, steps);
  at::Tensor result = torch::empty_like(rewards);
  at::Tensor later = torch::zeros({rewards.size(0)}, rewards.options());
  for (std::int64_t step = steps - 1; step >= 0; --step) {
    later = errors.select(1, step) + gamma * lambda * later;
    result.select(1, step).copy_(later);
  }
  return result;
}

at::Tensor normalised_over_ranks(const at::Tensor& advantages, const ddpkit::ProcessGroup& group) {
  const at::Tensor all = advantages.to(torch::kCPU, torch::kDouble);
  const auto sums = ddpkit::train::sum_over_ranks({static_cast<double>(all.numel()), all.sum().item<double>()}, group);
  const double count = sums[0], mean = sums[1] / count;
  const double squares = ddpkit::train::sum_over_ranks({(all - mean).square().sum().item<double>()}, group)[0];
  const double deviation = std::sqrt(squares / count);
  return (advantages - mean) / (deviation + 1e-8);
}

at::Tensor log_probability(const at::Tensor& actions, const at::Tensor& mean, const at::Tensor& log_std) {
  const double constant = 0.5 * std::log(2 * std::numbers::pi);
  return (-0.5 * ((actions - mean) * (-log_std).exp()).square() - log_std - constant).sum(-1);
}

PpoLoss ppo_loss(const PpoBatch& batch, const PpoOptions& options) {
  const at::Tensor log_ratio = batch.log_probability - batch.old_log_probability, ratio = log_ratio.exp();
  const at::Tensor surrogate =
      torch::minimum(ratio * batch.advantage, ratio.clamp(1 - options.clip, 1 + options.clip) * batch.advantage);
  PpoLoss loss;
  loss.policy = -surrogate.mean();
  loss.value = (batch.value - batch.target).square().mean();
  loss.entropy = (batch.log_std + 0.5 * std::log(2 * std::numbers::pi * std::numbers::e)).sum();
  loss.total = loss.policy + options.value * loss.value - options.entropy * loss.entropy;
  const torch::NoGradGuard no_grad;
  loss.kl = (ratio - 1 - log_ratio).mean().detach();
  loss.clipped = ((ratio - 1).abs() > options.clip).to(torch::kFloat).mean();
  return loss;
}

}  // namespace clstm_ppo
