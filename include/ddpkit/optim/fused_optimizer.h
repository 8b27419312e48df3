// Tier 2: torch/optim/optimizer.h.
#pragma once

#include <torch/optim/optimizer.h>

#include <array>
#include <cstddef>
#include <functional>
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

/// The float32 copy of a parameter, as part of its state; see FusedOptions::master_weights.
class MasterWeight {
 public:
  at::Tensor master_param;  ///< float32, the parameter's shape.
};

/// The state of all parameters of one group with the same type and device, concatenated. It can be split at any
/// element, regardless of the borders of the parameters.
struct FlatState {
  std::size_t group = 0;               ///< Index of the parameter group in the optimizer.
  at::ScalarType dtype = at::kFloat;   ///< Type of the parameters.
  at::Device device = at::kCPU;        ///< Device of parameters and state.
  std::vector<at::Tensor> parameters;  ///< [param]
  std::vector<std::int64_t> offsets;   ///< First element of each parameter's state in every tensor below. [param]
  std::vector<at::Tensor> tensors;     ///< One-dimensional: exp_avg, exp_avg_sq ... or momentum_buffer. [kind]
  at::Tensor master = {};              ///< float32, and `tensors` are float32 too; undefined without master weights.
};

class Algorithm;

/// Base class of FusedAdamW, FusedAdam and FusedSGD. They replace the optimizers of torch::optim: same options,
/// parameter groups, state and archives. They pass over memory once per step instead of five to twelve times.
///
/// Parameters are float32, float64, bfloat16 or float16 (computed in float32). The state has the parameter's type, as
/// in torch::optim, or float32 (FusedOptions::master_weights). On the CPU, vector kernels run on LibTorch's threads.
/// The bits of the result do not depend on the number of threads or the processor. On CUDA, at::_fused_* runs.
/// Parameters without a gradient do not change. A parameter that a group lists twice is updated once. Not thread-safe.
class FusedOptimizer : public torch::optim::Optimizer, public GradientScaling {
 public:
  /// Updates all parameters from their gradients. Returns an undefined tensor. Throws InvalidArgument for a closure,
  /// which would have to be called several times (call loss.backward() before step()), for a sparse gradient, and for
  /// an unsuitable parameter.
  at::Tensor step(LossClosure closure = nullptr) final;
  /// On CUDA the gradients themselves are multiplied too.
  void step_scaled(double factor) override;

  /// Calls clip_grad_norm_() with all parameters of this optimizer.
  double clip_grad_norm(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);

  /// Returns the state as it is in memory. add_param_group() and other changes of the parameters rebuild it. Tensors
  /// are undefined before the first step of a group.
  const std::vector<FlatState>& flat_state();

  /// Writes an archive that torch::optim can load.
  void save(torch::serialize::OutputArchive& archive) const final;
  /// Loads an archive of torch::optim or ddpkit. Keeps the memory of the state.
  void load(torch::serialize::InputArchive& archive) final;

  /// Returns FusedOptions::capturable.
  bool capturable() const noexcept { return fused_options_.capturable; }
  /// For GraphedStep: begins a capture. Captured steps run only when they are replayed. During the capture, step()
  /// throws InvalidArgument for a parameter without state: each replay would reset the state.
  void begin_capture();
  void end_capture();  ///< For GraphedStep: ends a capture.
  /// For GraphedStep: copies learning rates to the device, on the current stream, and counts the captured steps. Throws
  /// InvalidArgument if parameters, groups, or options other than the learning rate differ from the captured ones.
  void before_replay();
  /// Calls `fill`, which sets state() and the groups' options. Then moves the state to its previous memory, for
  /// parameters that are the same. If that throws, nothing changes.
  void replace_state(const std::function<void()>& fill);
  /// Returns the state of a parameter before its first step.
  std::unique_ptr<torch::optim::OptimizerParamState> make_state() const;

  /// Returns the options passed to the constructor.
  const FusedOptions& fused_options() const noexcept { return fused_options_; }
  /// Returns whether this optimizer keeps master weights for parameters of type `dtype`.
  bool has_master(at::ScalarType dtype) const noexcept;

  ~FusedOptimizer() override;
  FusedOptimizer(const FusedOptimizer&) = delete;
  FusedOptimizer& operator=(const FusedOptimizer&) = delete;

 protected:
  /// Throws InvalidArgument if `algorithm` does not support the options.
  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults, const Algorithm& algorithm,
                 const FusedOptions& options);
  /// Returns the group's learning rate as a scalar on the device.
  at::Tensor device_learning_rate(const torch::optim::OptimizerOptions& options, at::Device device);

 private:
  friend class ShardedOptimizerBase;
  struct Capture;
  struct Layout;
  using StateTensors = std::array<at::Tensor, 4>;  ///< [kind]; the last is the master weight.

  StateTensors tensors_of(const torch::optim::OptimizerParamState& state) const;
  void set_tensors(torch::optim::OptimizerParamState& state, const StateTensors& tensors) const;
  void update(const torch::optim::OptimizerOptions& options, Layout& layout, double factor);
  at::Tensor device_steps(const at::Tensor& parameter, torch::optim::OptimizerParamState& state);
  Layout& layout();
  bool fits_layout() const;
  void drop_duplicates();
  void adopt(Layout& layout);
  void set_device_steps();

  const Algorithm& algorithm_;
  FusedOptions fused_options_;
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<Capture> capture_;  ///< Copies of host values in device memory; null before the first.
};

/// Loads the archive of an optimizer of torch::optim or ddpkit. Differs from torch::load() for torch::optim in two
/// ways: a parameter that a group lists twice counts once (after torch::load() the next step crashes), and `initial_lr`
/// of the groups is restored. Throws InvalidArgument, and changes nothing, if the archive has other groups or another
/// number of parameters.
void load_archive(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive);

/// Returns the algorithm of the torch::optim optimizer that has these options.
template <class Options>
const Algorithm& algorithm_of();

/// A FusedOptimizer with the constructors of torch::optim.
template <class Options>
class FusedOptimizerWith : public FusedOptimizer {
 public:
  /// Takes the options of torch::optim. Throws InvalidArgument for values out of range.
  explicit FusedOptimizerWith(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                              const Options& defaults = {}, const FusedOptions& options = {})
      : FusedOptimizer(param_groups, std::make_unique<Options>(defaults), algorithm_of<Options>(), options) {}
  /// One parameter group with the options `defaults`.
  explicit FusedOptimizerWith(std::vector<at::Tensor> params, const Options& defaults = {},
                              const FusedOptions& options = {})
      : FusedOptimizerWith({torch::optim::OptimizerParamGroup(std::move(params))}, defaults, options) {}
};

}  // namespace ddpkit::optim
