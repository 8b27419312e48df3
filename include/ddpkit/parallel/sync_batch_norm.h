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

/// Parameters and buffers of a batch norm. Without `affine`, weight and bias are undefined. Without
/// `track_running_stats`, the others are undefined.
struct BatchNormTensors {
  at::Tensor weight;               ///< [num_features]
  at::Tensor bias;                 ///< [num_features]
  at::Tensor running_mean;         ///< [num_features]
  at::Tensor running_var;          ///< [num_features]
  at::Tensor num_batches_tracked;  ///< Scalar, int64.
};

/// Batch normalization over the combined batch of a group's ranks: Python's torch.nn.SyncBatchNorm, after Ioffe and
/// Szegedy, arXiv 1502.03167. Inputs have the shape [N, C, ...] and 2 to 5 dimensions (or more).
///
/// In training, forward computes mean and variance over the inputs of all ranks, and backward the gradient with respect
/// to the inputs. N ranks compute the same as one process with the combined batch. Batch sizes may differ between
/// ranks, and may be 0. Gradients of weight and bias are those of this rank's part of the batch;
/// DistributedDataParallel averages them.
///
/// Collective in training: every rank calls forward, and backward if the input requires a gradient. Without a group, in
/// a group of one rank, and in eval mode it is torch::nn::BatchNorm1d/2d/3d, with the same options, parameters, buffers
/// and names. Without running statistics, eval mode normalizes by this rank's batch, as in Python. No double backward.
///
/// Inputs in bfloat16 or float16 are normalized with float32 statistics (keep weight and buffers in float32).
class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  /// Normalizes over `group`. Without a group: plain batch norm.
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options,
                             std::optional<ProcessGroup> group = std::nullopt);
  /// Shares the parameters and buffers of another batch norm with these `options`. Each is [num_features] or undefined.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, const BatchNormTensors& shared,
                    std::optional<ProcessGroup> group);

  /// Creates new parameters and buffers.
  void reset() override;

  /// Normalizes `input`, [N, C, ...] with C = num_features. Returns the same shape and type. Collective in training.
  /// Throws InvalidArgument on all ranks if a rank has another shape, or if the combined batch has one value per
  /// channel.
  at::Tensor forward(const at::Tensor& input);

  /// Sets the ranks to normalize over. Empty: only this rank.
  void set_process_group(std::optional<ProcessGroup> group) { group_ = std::move(group); }
  /// Returns the ranks to normalize over. Empty: only this rank.
  const std::optional<ProcessGroup>& process_group() const noexcept { return group_; }

  /// Prints the layer's name and options.
  void pretty_print(std::ostream& stream) const override;

  torch::nn::BatchNormOptions options;  ///< The options passed to the constructor.
  at::Tensor weight;                    ///< [num_features]; undefined without `affine`.
  at::Tensor bias;                      ///< [num_features]; undefined without `affine`.
  at::Tensor running_mean;              ///< [num_features]; undefined without `track_running_stats`.
  at::Tensor running_var;               ///< [num_features]; undefined without `track_running_stats`.
  at::Tensor num_batches_tracked;       ///< Scalar, int64; undefined without `track_running_stats`.

 private:
  void register_tensors(const BatchNormTensors& tensors);
  at::Tensor forward_together(const at::Tensor& input, double momentum);

  std::optional<ProcessGroup> group_;
};

TORCH_MODULE(SyncBatchNorm);

/// Makes every batch norm in `module`'s tree normalize over `group`: Python's SyncBatchNorm.convert_sync_batchnorm.
///
/// - A BatchNorm1d, 2d or 3d in a Sequential, ModuleList or ModuleDict is replaced by a SyncBatchNorm with the same
///   parameters and buffers, under the same name. The caller's pointers to the old module still refer to the old
///   module.
/// - Every SyncBatchNorm gets `group`. Declare batch-norm members of custom modules as ddpkit::SyncBatchNorm: it is
///   plain batch norm until it has a group.
/// - A BatchNorm1d, 2d or 3d that is a data member of a module cannot be replaced, because the module's forward would
///   still call the old one. Throws InvalidArgument, which names all such modules and all modules whose type derives
///   from BatchNorm, and changes nothing. Also throws if `module` itself is a batch norm.
///
/// Convert before wrapping with DistributedDataParallel, in the same way on every rank. State dicts do not change.
/// Returns the names of all layers that now use `group`, such as "features.1".
std::vector<std::string> convert_sync_batchnorm(torch::nn::Module& module, const ProcessGroup& group);

/// Takes a module by pointer.
template <class M>
requires std::is_base_of_v<torch::nn::Module, M> std::vector<std::string> convert_sync_batchnorm(
    const std::shared_ptr<M>& module, const ProcessGroup& group) {
  return convert_sync_batchnorm(static_cast<torch::nn::Module&>(*module), group);
}
/// Takes a module made with TORCH_MODULE.
template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> std::vector<std::string>
convert_sync_batchnorm(const Holder& holder, const ProcessGroup& group) {
  return convert_sync_batchnorm(holder.ptr(), group);
}

}  // namespace ddpkit
