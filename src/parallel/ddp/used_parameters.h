// Tier 2: autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ddpkit/parallel/reducer.h>

#include "parallel/autograd/gradient_hooks.h"

namespace ddpkit {

/// What happens if a backward gives no gradient to a parameter.
enum class UnusedPolicy {
  kError,
  kFind,         ///< The parameter contributes zeros. Buckets do not wait for parameters that no output depends on.
  kStaticGraph,  ///< The same in the first backward. Each later backward must use what the first one used.
};

/// Which parameters a backward uses: expected ones, those whose gradients came on this rank, and those used on any
/// rank. `[param]` counts as in the reducer. Not thread-safe.
class UsedParameters {
 public:
  /// `parameters` must outlive this object.
  UsedParameters(const std::vector<NamedParameter>& parameters, ProcessGroup group, UnusedPolicy policy);

  UnusedPolicy policy() const noexcept { return policy_; }
  /// A static graph is learned in its first backward.
  bool learns_graph() const { return policy_ == UnusedPolicy::kStaticGraph && !graph_known_; }
  /// Whether each backward has to bring all gradients that are expected.
  bool must_be_complete() const { return policy_ == UnusedPolicy::kError || graph_known_; }

  /// A forward pass has begun, before a backward that will be averaged.
  void count_forward() noexcept { ++hidden_forwards_; }
  /// The forward pass has returned `outputs`. Returns false if they hide their parameters, as checkpoints do: if none
  /// depends on a parameter.
  bool find(const std::vector<at::Tensor>& outputs, const GradientHooks& hooks);
  /// Whether a forward pass has not shown its outputs since the last averaged backward. Its backward may have passed
  /// unseen.
  bool forwards_hidden() const noexcept { return hidden_forwards_ > 0; }

  void begin_backward();
  /// A backward of a rank without inputs: the rank uses no parameter.
  void begin_shadow();
  /// In any backward, averaged or not.
  void mark_used(std::size_t param) { used_since_sync_[param] = true; }
  /// A gradient has come. Throws if no further gradient is expected. `bucket`, here and below: for errors.
  void add(std::size_t param, std::optional<std::size_t> bucket);
  int arrivals(std::size_t param) const { return arrivals_[param]; }
  /// Whether the parameter's bucket waits for the parameter.
  bool expects(std::size_t param) const { return expected_[param] > 0; }
  /// Whether no further gradient comes. While a graph is learned, that is known only when backward ends.
  bool is_ready(std::size_t param) const { return !learns_graph() && arrivals_[param] >= expected_[param]; }
  /// Throws on this rank, and aborts the group, if a gradient must have come and has not.
  void check_complete(std::size_t bucket) const;
  [[noreturn]] void throw_late(std::size_t param, std::size_t bucket) const;

  /// Collective: finds out which parameters were used on some rank. Throws if the ranks ran different numbers of
  /// forward passes. `has_inputs` is false in a shadow.
  void agree(bool has_inputs);
  void learn_graph();
  /// By the last agreement. True for all parameters if each must be used.
  bool used_anywhere(std::size_t param) const;
  /// A backward has been averaged.
  void end_backward();
  /// Forward's outputs are forgotten: backward has ended or failed.
  void reset() noexcept { outputs_known_ = false; }

 private:
  void check_forwards() const;
  [[noreturn]] void throw_ready_twice(std::size_t param, std::optional<std::size_t> bucket) const;

  const std::vector<NamedParameter>& parameters_;
  ProcessGroup group_;
  UnusedPolicy policy_;
  bool graph_known_ = false;
  bool outputs_known_ = false;         ///< find() has been called since the last backward.
  std::uint64_t hidden_forwards_ = 0;  ///< Since the last averaged backward, without a call of find() after them.
  std::vector<bool> reachable_;        ///< From the outputs. [param]
  std::vector<bool> used_since_sync_;  ///< In a backward since the last averaged one, the present one included. [param]
  std::vector<int> arrivals_;          ///< Gradients that have come in this backward. [param]
  std::vector<int> expected_;          ///< Gradients for which the bucket waits in this backward. [param]
  std::vector<int> in_graph_;          ///< Gradients in each backward. A static graph learns them. [param]
  at::Tensor globally_used_;           ///< Of the last agreement: 1 if used on some rank. uint8 [param]
};

}  // namespace ddpkit
