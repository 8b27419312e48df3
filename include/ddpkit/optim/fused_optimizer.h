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
  /// step(), with all gradients multiplied by `factor` as they are read. The gradients themselves keep their values.
  virtual void step_scaled(double factor) = 0;
  /// Whether each rank sees other gradients than the others.
  virtual bool has_sharded_gradients() const noexcept { return false; }
};

/// What torch::optim's options have no room for.
struct FusedOptions {
  /// Go up the gradient instead of down.
  bool maximize = false;
  /// On CUDA kernels read learning rate and step count from the device's memory, so that a CUDA graph may hold step():
  /// see GraphedStep. Without effect on the CPU.
  bool capturable = false;
  /// Of bfloat16 and float16 parameters keep a float32 copy, which is what is updated; the parameter becomes what it
  /// rounds to, and the rest of the state is float32 too. After Micikevicius and others, arXiv 1710.03740. The copies
  /// are part of archives and state dicts (`master_param`). A parameter that is written to, or is loaded without its
  /// state, takes its copy along with the next step.
  bool master_weights = false;
};

/// The float32 copy of a parameter, in a state of FusedOptions::master_weights.
class MasterWeight {
 public:
  at::Tensor master_param;  ///< float32, in the parameter's shape.
};

/// The state of those parameters of one group that have one type and device, end to end, so that it can be cut into
/// parts regardless of the parameters' borders.
struct FlatState {
  std::size_t group = 0;              ///< Index among the optimizer's parameter groups.
  at::ScalarType dtype = at::kFloat;  ///< The parameters'.
  at::Device device = at::kCPU;
  std::vector<at::Tensor> parameters;  ///< [param]
  std::vector<std::int64_t> offsets;   ///< Where each one's state begins in every tensor below, in elements. [param]
  std::vector<at::Tensor> tensors;     ///< One-dimensional: exp_avg, exp_avg_sq ... or momentum_buffer. [kind]
  at::Tensor master = {};              ///< float32, as are `tensors` then; undefined without master weights.
};

class Algorithm;

/// What FusedAdamW, FusedAdam and FusedSGD have in common: they take the place of torch::optim's, with the same
/// options, parameter groups, state and archives, but go over memory once a step instead of five to twelve times.
///
/// Parameters are float32, float64, bfloat16 or float16 (computed in float32); state has the parameter's type, as in
/// torch::optim, or float32 (FusedOptions::master_weights). On the CPU vector kernels do the update on LibTorch's
/// threads, with the same bits whatever their number and the processor; on CUDA at::_fused_* does. A parameter without
/// a gradient is left as it is. A parameter that a group lists twice is updated once. Not thread-safe.
class FusedOptimizer : public torch::optim::Optimizer, public GradientScaling {
 public:
  /// Updates all parameters by their gradients. Throws InvalidArgument when given a closure, which would have to be
  /// called several times: call loss.backward() yourself; and for a sparse gradient or an unsuitable parameter.
  /// Returns an undefined tensor.
  at::Tensor step(LossClosure closure = nullptr) final;
  /// On CUDA the gradients themselves are multiplied too.
  void step_scaled(double factor) override;

  /// clip_grad_norm_() of all parameters of this optimizer.
  double clip_grad_norm(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);

  /// The state as it lies in memory; laid out anew by add_param_group() and whatever else changes the parameters.
  /// Undefined before the first step of a group, where nothing has been allocated.
  const std::vector<FlatState>& flat_state();

  /// Archives are torch::optim's: either reads what the other wrote. load() keeps the memory of the state.
  void save(torch::serialize::OutputArchive& archive) const final;
  void load(torch::serialize::InputArchive& archive) final;

  /// FusedOptions::capturable.
  bool capturable() const noexcept { return fused_options_.capturable; }
  /// For GraphedStep, around the capture of steps: they run on no device until they are replayed. In between, step()
  /// throws InvalidArgument for a parameter that has no state yet: the graph would reset the state in each replay.
  void begin_capture();
  void end_capture();
  /// For GraphedStep: copies learning rates to the device, on the current stream, and counts the captured steps. Throws
  /// InvalidArgument if parameters, groups, or options other than the learning rate differ from the captured ones.
  void before_replay();
  /// `fill` sets state() and the groups' options; then the state moves to the memory that it had, as far as the
  /// parameters are the same. If that throws, everything is as before.
  void replace_state(const std::function<void()>& fill);
  /// A parameter's state before its first step.
  std::unique_ptr<torch::optim::OptimizerParamState> make_state() const;

  /// As given to the constructor.
  const FusedOptions& fused_options() const noexcept { return fused_options_; }
  /// Whether parameters of that type have master weights here.
  bool has_master(at::ScalarType dtype) const noexcept;

  ~FusedOptimizer() override;
  FusedOptimizer(const FusedOptimizer&) = delete;
  FusedOptimizer& operator=(const FusedOptimizer&) = delete;

 protected:
  /// Throws InvalidArgument for options that `algorithm` refuses.
  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults, const Algorithm& algorithm,
                 const FusedOptions& options);
  /// The group's learning rate as a scalar of the device.
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
  std::unique_ptr<Capture> capture_;  ///< Numbers of the host in memory of a device; null before the first.
};

/// Reads an archive of an optimizer, of torch::optim's or of ddpkit's. Two things differ from torch::load() of an
/// optimizer of torch::optim: a parameter that a group lists twice counts once (torch::load() crashes the next step),
/// and the groups get their `initial_lr` back. Throws InvalidArgument, with the optimizer as it was, if the archive has
/// other groups or another number of parameters.
void load_archive(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive);

/// The algorithm of torch::optim's optimizer with these options.
template <class Options>
const Algorithm& algorithm_of();

/// A FusedOptimizer that is made like torch::optim's.
template <class Options>
class FusedOptimizerWith : public FusedOptimizer {
 public:
  /// Options as torch::optim's; throws InvalidArgument for values out of their range.
  explicit FusedOptimizerWith(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                              const Options& defaults = {}, const FusedOptions& options = {})
      : FusedOptimizer(param_groups, std::make_unique<Options>(defaults), algorithm_of<Options>(), options) {}
  explicit FusedOptimizerWith(std::vector<at::Tensor> params, const Options& defaults = {},
                              const FusedOptions& options = {})
      : FusedOptimizerWith({torch::optim::OptimizerParamGroup(std::move(params))}, defaults, options) {}
};

}  // namespace ddpkit::optim
