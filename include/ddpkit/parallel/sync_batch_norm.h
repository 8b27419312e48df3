// Tier 2: torch/nn/module.h and batch norm's options.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <ddpkit/comm/process_group.h>

namespace ddpkit {

/// What a batch norm learns and keeps. Undefined without `affine` and `track_running_stats`.
struct BatchNormTensors {
  at::Tensor weight, bias;
  at::Tensor running_mean, running_var, num_batches_tracked;
};

/// Batch normalisation over the joined batch of a group's ranks: Python's torch.nn.SyncBatchNorm, for inputs of shape
/// [N, C, ...] of 2 to 5 dimensions (or more), after Ioffe and Szegedy, arXiv 1502.03167.
///
/// While training, forward computes mean and variance over all ranks' inputs, and backward the gradient with regard to
/// them, so that N ranks do exactly what one process would do with their batches joined. Ranks may bring batches of
/// different sizes, an empty one too. Gradients of weight and bias are of this rank's part of the batch;
/// DistributedDataParallel averages them like any other.
///
/// Collective while training: every rank's forward, and its backward where the input wants a gradient. Without a group,
/// in a group of one rank, and in eval mode it is torch::nn::BatchNorm1d/2d/3d, with the same options, parameters,
/// buffers and names. Where no running statistics are tracked, eval mode normalises by this rank's batch, as Python's
/// does. Differentiable once.
///
/// Inputs in bfloat16 or float16 are normalised with float32 statistics (keep weight and buffers in float32).
class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  /// Over `group`; without one, plain batch norm.
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options,
                             std::optional<ProcessGroup> group = std::nullopt);
  /// On the parameters and buffers of another batch norm, which `options` describe; each [num_features] or undefined.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, const BatchNormTensors& shared,
                    std::optional<ProcessGroup> group);

  /// Fresh parameters and buffers, of this module's own.
  void reset() override;

  /// `input` is [N, C, ...] with C = num_features; returns the same shape and type.
  /// Throws InvalidArgument if a rank has another shape, or if the joined batch has one value per channel; on all
  /// ranks.
  at::Tensor forward(const at::Tensor& input);

  /// Ranks to normalise over from now on; empty: this rank alone.
  void set_process_group(std::optional<ProcessGroup> group) { group_ = std::move(group); }
  const std::optional<ProcessGroup>& process_group() const noexcept { return group_; }

  void pretty_print(std::ostream& stream) const override;

  torch::nn::BatchNormOptions options;
  at::Tensor weight, bias;                                    ///< Undefined without `affine`.
  at::Tensor running_mean, running_var, num_batches_tracked;  ///< Undefined without `track_running_stats`.

 private:
  void register_tensors(const BatchNormTensors& tensors);
  at::Tensor forward_together(const at::Tensor& input, double momentum);

  std::optional<ProcessGroup> group_;
};

TORCH_MODULE(SyncBatchNorm);

/// Makes every batch norm in `module`'s tree normalise over `group`: Python's SyncBatchNorm.convert_sync_batchnorm.
///
/// - A BatchNorm1d, 2d or 3d in a Sequential, ModuleList or ModuleDict is replaced by a SyncBatchNorm on the same
///   parameters and buffers, under the same name. Pointers to the old module that the caller kept go on meaning the old
///   one.
/// - A SyncBatchNorm, wherever it is, gets `group`. Declare a module's own members as ddpkit::SyncBatchNorm: until it
///   has a group it is plain batch norm.
/// - A BatchNorm1d, 2d or 3d that is a member of a module's type can't be exchanged from outside, as its forward would
///   go on calling the old one. InvalidArgument names every such module, and one whose type derives from BatchNorm;
///   then nothing has been changed. So does a `module` that is itself a batch norm.
///
/// Convert before wrapping with DistributedDataParallel, and do the same on every rank. State dicts stay as they were.
/// Returns the names of all layers that now use `group`, such as "features.1".
std::vector<std::string> convert_sync_batchnorm(torch::nn::Module& module, const ProcessGroup& group);

/// The same for a module by pointer or by its holder.
template <class M>
requires std::is_base_of_v<torch::nn::Module, M> std::vector<std::string> convert_sync_batchnorm(
    const std::shared_ptr<M>& module, const ProcessGroup& group) {
  return convert_sync_batchnorm(static_cast<torch::nn::Module&>(*module), group);
}
template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> std::vector<std::string>
convert_sync_batchnorm(const Holder& holder, const ProcessGroup& group) {
  return convert_sync_batchnorm(holder.ptr(), group);
}

}  // namespace ddpkit
