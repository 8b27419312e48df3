// Tier 2: autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/bucket_plan.h>

#include "parallel/autograd/gradient_hooks.h"

namespace ddpkit {

/// The effect of a backward without a gradient for a parameter.
enum class UnusedPolicy {
  kError,
  kFind,         ///< The parameter contributes zeros. Buckets do not wait for parameters that no output depends on.
  kStaticGraph,  ///< As kFind in the first backward. Each later backward must use the same parameters as the first.
};

/// Tracks the parameters of a backward: those expected, those with a gradient on this rank, and those used on any rank.
/// `[param]` is the index in the reducer. Not thread-safe.
class UsedParameters {
 public:
  /// `parameters` must outlive this object.
  UsedParameters(const std::vector<NamedParameter>& parameters, ProcessGroup group, UnusedPolicy policy);

  UnusedPolicy policy() const noexcept { return policy_; }
  /// Returns whether this backward learns the static graph: the first one does.
  bool learns_graph() const { return policy_ == UnusedPolicy::kStaticGraph && !graph_known_; }
  /// Returns whether each backward must produce all expected gradients.
  bool must_be_complete() const { return policy_ == UnusedPolicy::kError || graph_known_; }

  /// Call at the start of a forward pass before a backward that will be averaged.
  void count_forward() noexcept { ++hidden_forwards_; }
  /// Call after the forward pass has returned `outputs`. Returns false if the outputs hide their parameters, as
  /// checkpoints do: if no output depends on a parameter.
  bool find(const std::vector<at::Tensor>& outputs, const GradientHooks& hooks);
  /// Returns whether a forward pass has not shown its outputs since the last averaged backward. Its backward may have
  /// passed undetected.
  bool forwards_hidden() const noexcept { return hidden_forwards_ > 0; }

  void begin_backward();
  /// Begins a backward of a rank without inputs, which uses no parameter.
  void begin_shadow();
  /// Call in any backward, averaged or not.
  void mark_used(std::size_t param) { used_since_sync_[param] = true; }
  /// Adds an arrived gradient. Throws if no further gradient is expected. `bucket`, here and below: for errors.
  void add(std::size_t param, std::optional<std::size_t> bucket);
  int arrivals(std::size_t param) const { return arrivals_[param]; }
  /// Returns whether the parameter's bucket waits for the parameter.
  bool expects(std::size_t param) const { return expected_[param] > 0; }
  /// Returns whether all gradients of the parameter have arrived. While a graph is learned, this is known only at the
  /// end of backward.
  bool is_ready(std::size_t param) const { return !learns_graph() && arrivals_[param] >= expected_[param]; }
  /// Throws on this rank and aborts the group if an expected gradient is missing.
  void check_complete(std::size_t bucket) const;
  [[noreturn]] void throw_late(std::size_t param, std::size_t bucket) const;

  /// Collective: determines the parameters used on any rank. Throws if the ranks ran different numbers of forward
  /// passes. `has_inputs` is false in a shadow backward.
  void agree(bool has_inputs);
  void learn_graph();
  /// Result of the last agree(). True for all parameters if each must be used.
  bool used_anywhere(std::size_t param) const;
  /// Call after an averaged backward.
  void end_backward();
  /// Forgets the forward pass's outputs, after backward has ended or failed.
  void reset() noexcept { outputs_known_ = false; }

 private:
  void check_forwards() const;
  [[noreturn]] void throw_ready_twice(std::size_t param, std::optional<std::size_t> bucket) const;

  const std::vector<NamedParameter>& parameters_;
  ProcessGroup group_;
  UnusedPolicy policy_;
  bool graph_known_ = false;
  bool outputs_known_ = false;         ///< find() has been called since the last backward.
  std::uint64_t hidden_forwards_ = 0;  ///< Forward passes since the last averaged backward and since find().
  std::vector<bool> reachable_;        ///< Reachable from the outputs. [param]
  std::vector<bool> used_since_sync_;  ///< Used since the last averaged backward, in the current one too. [param]
  std::vector<int> arrivals_;          ///< Gradients that have arrived in this backward. [param]
  std::vector<int> expected_;          ///< Gradients for which the bucket waits in this backward. [param]
  std::vector<int> in_graph_;          ///< Gradients in each backward. A static graph learns them. [param]
  at::Tensor globally_used_;           ///< Result of the last agree(): 1 if used on any rank. uint8 [param]
};

}  // namespace ddpkit
