// Tier 2: torch/optim/optimizer.h.
#pragma once

#include <torch/optim/optimizer.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ddpkit/optim/clip_grad_norm.h>
#include <ddpkit/optim/gradient_scaling.h>

namespace ddpkit::optim {

/// What torch::optim's options have no room for.
struct FusedOptions {
  /// Go up the gradient instead of down.
  bool maximize = false;
  /// On CUDA kernels read learning rate and step count from the device's memory, so that a CUDA graph may hold step():
  /// see GraphedStep. Without effect on the CPU.
  bool capturable = false;
};

/// The state of those parameters of one group that have one type and device, end to end, so that it can be cut into
/// parts regardless of the parameters' borders.
struct FlatState {
  std::size_t group = 0;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  std::vector<at::Tensor> parameters;  ///< [param]
  std::vector<std::int64_t> offsets;   ///< Where each one's state begins in every tensor below, in elements. [param]
  std::vector<at::Tensor> tensors;     ///< One-dimensional: exp_avg, exp_avg_sq ... or momentum_buffer. [kind]
};

/// What FusedAdamW, FusedAdam and FusedSGD have in common: they take the place of torch::optim's, with the same
/// options, parameter groups, state and archives, but go over memory once a step instead of five to twelve times.
///
/// Parameters are float32, float64, bfloat16 or float16 (computed in float32); state has the parameter's type, as in
/// torch::optim. On the CPU vector kernels do the update on LibTorch's threads, with the same bits whatever their
/// number and the processor; on CUDA at::_fused_* does. A parameter without a gradient is left as it is. Not
/// thread-safe.
class FusedOptimizer : public torch::optim::Optimizer, public GradientScaling {
 public:
  /// Updates all parameters by their gradients. Throws InvalidArgument when given a closure, which would have to be
  /// called several times: call loss.backward() yourself; and for a sparse gradient or an unsuitable parameter.
  /// Returns an undefined tensor.
  at::Tensor step(LossClosure closure = nullptr) final;

  /// The gradients themselves stay as they are (on CUDA they are multiplied too).
  void scale_gradients(double factor) override { gradient_factor_ *= factor; }

  /// clip_grad_norm_() without its second pass over memory: reads the gradients of all parameters, as scaled by
  /// scale_gradients(), returns their norm, and has the next step() scale them down to `max_norm`. Same arguments.
  double clip_grad_norm(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);

  /// The state as it lies in memory; laid out anew by add_param_group() and whatever else changes the parameters.
  /// Undefined before the first step of a group, where nothing has been allocated.
  const std::vector<FlatState>& flat_state();

  /// Archives are torch::optim's: either reads what the other wrote.
  void save(torch::serialize::OutputArchive& archive) const final;
  void load(torch::serialize::InputArchive& archive) final;

  bool capturable() const noexcept { return fused_options_.capturable; }
  /// For GraphedStep. A captured step() has been counted, but not done.
  void after_capture();
  /// For GraphedStep: learning rates go to the device, on the current stream, and the step is counted.
  void before_replay();

  ~FusedOptimizer() override;
  FusedOptimizer(const FusedOptimizer&) = delete;
  FusedOptimizer& operator=(const FusedOptimizer&) = delete;

 protected:
  using StateTensors = std::array<at::Tensor, 3>;  ///< [kind]

  /// A parameter that has a gradient, in one step.
  struct Update {
    at::Tensor parameter, gradient;  ///< Of the same type and, on the CPU, the same dense layout.
    StateTensors tensors;            ///< Of the same layout.
    torch::optim::OptimizerParamState* state = nullptr;
    bool fresh = false;  ///< This is its first step: the state is zero.
  };

  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults, const FusedOptions& options);

  /// How many tensors a parameter's state has with these options.
  virtual std::size_t tensor_count(const torch::optim::OptimizerOptions& options) const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> make_state() const = 0;
  virtual StateTensors tensors_of(const torch::optim::OptimizerParamState& state) const = 0;
  virtual void set_tensors(torch::optim::OptimizerParamState& state, const StateTensors& tensors) const = 0;
  /// All parameters of one group, type and device that have a gradient; counts their step.
  virtual void update(const torch::optim::OptimizerOptions& options, std::vector<Update>& updates,
                      double gradient_factor) = 0;
  virtual void write(torch::serialize::OutputArchive& archive) const = 0;
  virtual void read(torch::serialize::InputArchive& archive) = 0;

  const FusedOptions& fused_options() const noexcept { return fused_options_; }

  /// Adds to a state's count of steps, where it has one.
  virtual void add_steps(torch::optim::OptimizerParamState&, std::int64_t) const {}
  /// The group's learning rate as a scalar of the device, brought up to date.
  at::Tensor device_learning_rate(const torch::optim::OptimizerOptions& options, at::Device device);
  /// The state's step count as a scalar of the device, which begins with `steps`; the caller counts on.
  at::Tensor device_step(const torch::optim::OptimizerParamState& state, std::int64_t steps, at::Device device);

 private:
  friend class ShardedOptimizerBase;
  struct Layout;

  Layout& layout();
  void adopt(Layout& layout);
  void count_steps(std::int64_t count);
  void forget_device_numbers() noexcept;

  /// A number of the host's in memory of a device.
  struct DeviceNumber {
    at::Tensor tensor;
    double value = 0;
  };
  std::unordered_map<const void*, DeviceNumber> learning_rates_;  ///< By the group's options.
  std::unordered_map<const void*, DeviceNumber> steps_;           ///< By the parameter's state.

  FusedOptions fused_options_;
  double gradient_factor_ = 1;
  std::unique_ptr<Layout> layout_;
};

}  // namespace ddpkit::optim
