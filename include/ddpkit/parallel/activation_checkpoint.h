// Tier 1: ATen/core/Tensor.h, through pytree.h.
#pragma once

#include <ddpkit/parallel/pytree.h>

#include <concepts>
#include <functional>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace ddpkit {

/// Options of activation_checkpoint(), with Python's names.
struct ActivationCheckpointOptions {
  /// The second run starts from the random generators' states of the first: of the CPU, and of the GPUs of the inputs.
  /// Without random numbers in the function, false saves a copy of 5 KB per call.
  bool preserve_rng_state = true;
  /// Throw if the two runs save other numbers, shapes, types or devices of tensors.
  bool determinism_check = true;
  /// Stop the second run after the last tensor that backward needs: an exception passes through the function. False:
  /// run it to its end.
  bool early_stop = true;
};

namespace detail {

/// While it exists, autograd saves no tensor of this thread, and runs `again` in backward instead. `inputs`: the
/// tensors to call `again` with.
class CheckpointScope {
 public:
  using Function = std::function<void(const std::vector<at::Tensor>& inputs)>;
  CheckpointScope(const ActivationCheckpointOptions& options, Function again, const std::vector<at::Tensor>& inputs);
  ~CheckpointScope();
  CheckpointScope(const CheckpointScope&) = delete;
  CheckpointScope& operator=(const CheckpointScope&) = delete;

 private:
  std::shared_ptr<struct CheckpointedCall> call_;
};

bool records_gradients();

}  // namespace detail

/// Returns function(args...), and trades time for memory: instead of the function's activations it keeps only its
/// inputs, and backward runs the function a second time. Gradients have the same bits as without it. As Python's
/// torch.utils.checkpoint.checkpoint(use_reentrant=False), after Chen et al., arXiv 1604.06174. Usually once per block:
///
///     for (auto& block : blocks) x = ddpkit::activation_checkpoint(block, x, mask);
///
/// `function`: a module holder or another callable. It is copied, and must be valid until the graph is freed: a lambda
/// must not capture local variables by reference. Both runs must compute the same: a state that the function changes,
/// such as the running statistics of batch normalization, changes twice. `args`: any nesting of tensors as in
/// tree_map(), and other values, which are copied.
///
/// Works with dropout, autocast, DistributedDataParallel, DataParallel, retain_graph, create_graph and nested calls.
/// Without gradients, only calls the function. The backward throws Error if the runs differ (see the options), and if a
/// tensor that the function uses has been modified in place since the first run. The first call replaces LibTorch's
/// autograd engine in this process; throws Error if another engine (Python's) is in use.
template <class Function, class... Args>
requires std::invocable<Function&, Args&...>
auto activation_checkpoint(const ActivationCheckpointOptions& options, Function function, Args... args) {
  if (!detail::records_gradients()) return std::invoke(function, args...);
  std::tuple<Args...> values(std::move(args)...);
  const auto without_tensors = tree_map(values, [](const at::Tensor&) { return at::Tensor(); });
  const detail::CheckpointScope scope(
      options,
      [function, without_tensors](const std::vector<at::Tensor>& inputs) mutable {
        auto again = tree_unflatten(without_tensors, inputs);
        std::apply(function, again);
      },
      tree_leaves(values));
  return std::apply(function, values);
}

/// With the default options.
template <class Function, class... Args>
requires std::invocable<Function&, Args&...>
auto activation_checkpoint(Function function, Args... args) {
  return activation_checkpoint(ActivationCheckpointOptions{}, std::move(function), std::move(args)...);
}

}  // namespace ddpkit
