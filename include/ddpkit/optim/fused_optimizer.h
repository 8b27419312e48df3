// Tier 2: torch/optim/optimizer.h.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <utility>
#include <vector>

#include <ddpkit/optim/clip_grad_norm.h>

namespace ddpkit::optim {

/// An optimizer that can multiply gradients while it reads them.
class GradientScaling {
 public:
  virtual ~GradientScaling() = default;
  /// Does step() with all gradients multiplied by `factor`. The gradients in memory do not change.
  virtual void step_scaled(double factor) = 0;
  /// Returns whether the gradients differ between ranks.
  virtual bool has_sharded_gradients() const noexcept { return false; }
};

/// Options that torch::optim's option classes do not have.
struct FusedOptions {
  /// Maximize instead of minimize.
  bool maximize = false;
  /// On CUDA, read learning rate and step count from device memory, so that a CUDA graph can capture step(); see
  /// GraphedStep. No effect on the CPU.
  bool capturable = false;
  /// Keep a float32 copy of bfloat16 and float16 parameters. step() updates the copy and rounds it to the parameter.
  /// The rest of the state is float32 too. After Micikevicius and others, arXiv 1710.03740. Archives and state dicts
  /// contain the copies (`master_param`). If a parameter is overwritten, or loaded without its state, the next step
  /// updates the copy from the parameter.
  bool master_weights = false;
};

/// Base class of FusedAdamW, FusedAdam and FusedSGD. They replace the optimizers of torch::optim: same options,
/// parameter groups, state and archives. They pass over memory once per step instead of five to twelve times.
///
/// Parameters are float32, float64, bfloat16 or float16 (computed in float32). The state has the parameter's type, as
/// in torch::optim, or float32 (FusedOptions::master_weights). On the CPU, vector kernels run on LibTorch's threads.
/// The bits of the result do not depend on the number of threads or the processor. On CUDA, at::_fused_* runs.
/// Parameters without a gradient do not change. A parameter that a group lists twice is updated once. Not thread-safe.
class FusedOptimizer : public torch::optim::Optimizer, public GradientScaling {
 public:
  class Impl;  ///< Internal.

  /// Updates all parameters from their gradients. Returns an undefined tensor. Throws InvalidArgument for a closure,
  /// which would have to be called several times (call loss.backward() before step()), for a sparse gradient, and for
  /// an unsuitable parameter.
  at::Tensor step(LossClosure closure = nullptr) final;
  /// On CUDA the gradients themselves are multiplied too.
  void step_scaled(double factor) override;

  /// Calls clip_grad_norm_() with all parameters of this optimizer.
  double clip_grad_norm(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);

  /// Writes an archive that torch::optim can load.
  void save(torch::serialize::OutputArchive& archive) const final;
  /// Loads an archive of torch::optim or ddpkit. Keeps the memory of the state.
  void load(torch::serialize::InputArchive& archive) final;

  /// Returns the options passed to the constructor.
  const FusedOptions& fused_options() const noexcept;

  ~FusedOptimizer() override;
  FusedOptimizer(const FusedOptimizer&) = delete;
  FusedOptimizer& operator=(const FusedOptimizer&) = delete;

 protected:
  /// Throws InvalidArgument for invalid options.
  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults, std::unique_ptr<Impl> impl);

 private:
  std::unique_ptr<Impl> impl_;
};

/// Loads the archive of an optimizer of torch::optim or ddpkit. Differs from torch::load() for torch::optim in two
/// ways: a parameter that a group lists twice counts once (after torch::load() the next step crashes), and `initial_lr`
/// of the groups is restored. Throws InvalidArgument, and changes nothing, if the archive has other groups or another
/// number of parameters.
void load_archive(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive);

/// A FusedOptimizer with the constructors of torch::optim.
template <class Options>
class FusedOptimizerWith : public FusedOptimizer {
 public:
  /// Takes the options of torch::optim. Throws InvalidArgument for values out of range.
  explicit FusedOptimizerWith(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                              const Options& defaults = {}, const FusedOptions& options = {});
  /// One parameter group with the options `defaults`.
  explicit FusedOptimizerWith(std::vector<at::Tensor> params, const Options& defaults = {},
                              const FusedOptions& options = {})
      : FusedOptimizerWith({torch::optim::OptimizerParamGroup(std::move(params))}, defaults, options) {}
};

}  // namespace ddpkit::optim
