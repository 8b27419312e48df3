// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <ddpkit/comm/process_group.h>

namespace clstm_ppo {

struct PpoOptions {
  double clip = 0.2;    ///< Ratios farther from 1 have no further effect.
  double gamma = 0.95;  ///< Discount per day.
  double gae_lambda = 0.95;
  double entropy = 0.0;  ///< Weight of the entropy bonus.
  double value = 0.5;    ///< Weight of the value loss.
  double max_grad_norm = 0.5;
};

/// Generalised advantage estimates: A_t = d_t + gamma lambda A_(t+1) with d_t = r_t + gamma V_(t+1) - V_t. J. Schulman
/// and others, arXiv 1506.02438. `rewards`: [episodes, steps]. `values`: [episodes, steps + 1]; the last value
/// estimates all later rewards, since an episode is truncated and the market continues. Returns [episodes, steps].
at::Tensor advantages_of(const at::Tensor& rewards, const at::Tensor& values, double gamma, double lambda);

/// Normalises to mean 0 and standard deviation 1 over all ranks, so that N ranks learn the same as one rank with all
/// their episodes. Collective.
at::Tensor normalised_over_ranks(const at::Tensor& advantages, const ddpkit::ProcessGroup& group);

/// Logarithm of the density of `actions` under independent normal distributions, summed over the assets. [..., assets]
at::Tensor log_probability(const at::Tensor& actions, const at::Tensor& mean, const at::Tensor& log_std);

/// The input of the loss for a minibatch: values of the current policy, and of the policy that drew the actions.
struct PpoBatch {
  at::Tensor log_probability, old_log_probability;  ///< [batch, steps]
  at::Tensor advantage;                             ///< [batch, steps], normalised.
  at::Tensor value, target;                         ///< [batch, steps]
  at::Tensor log_std;                               ///< [assets]
};

struct PpoLoss {
  at::Tensor total;    ///< The loss to minimize.
  at::Tensor policy;   ///< The negative clipped surrogate.
  at::Tensor value;    ///< Mean squared error.
  at::Tensor entropy;  ///< Of the actions.
  at::Tensor kl;       ///< Estimated KL divergence from the old policy: E[(ratio - 1) - log ratio].
  at::Tensor clipped;  ///< Share of ratios outside the clip range.
};

/// The clipped surrogate objective: J. Schulman and others, "Proximal Policy Optimization Algorithms", arXiv
/// 1707.06347.
PpoLoss ppo_loss(const PpoBatch& batch, const PpoOptions& options);

}  // namespace clstm_ppo
