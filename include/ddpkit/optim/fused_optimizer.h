// Tier 2: torch/optim/optimizer.h.
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
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

/// torch::optim's state of a parameter with its master weight.
template <class State>
class WithMaster final : public State, public MasterWeight {
 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    State::serialize(archive);
    c10::IValue value;
    if (archive.try_read("master_param", value) && value.isTensor()) master_param = value.toTensor();
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    State::serialize(archive);
    if (master_param.defined()) archive.write("master_param", c10::IValue(master_param));
  }

 private:
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<WithMaster>(*this);
  }
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

/// What FusedAdamW, FusedAdam and FusedSGD have in common: they take the place of torch::optim's, with the same
/// options, parameter groups, state and archives, but go over memory once a step instead of five to twelve times.
///
/// Parameters are float32, float64, bfloat16 or float16 (computed in float32); state has the parameter's type, as in
/// torch::optim, or float32 (FusedOptions::master_weights). On the CPU vector kernels do the update on LibTorch's
/// threads, with the same bits whatever their number and the processor; on CUDA at::_fused_* does. A parameter without
/// a gradient is left as it is. Not thread-safe.
class FusedOptimizer : public torch::optim::Optimizer, public GradientScaling {
 public:
  /// Updates all parameters by their gradients. Throws InvalidArgument when given a closure, which would have to be
  /// called several times: call loss.backward() yourself; and for a sparse gradient or an unsuitable parameter.
  /// Returns an undefined tensor.
  at::Tensor step(LossClosure closure = nullptr) final;

  /// torch::optim's, and takes back what scale_gradients() and clip_grad_norm() have said of the gradients. Where a
  /// step is left out and the module's zero_grad() is called instead of this, call reset_scale().
  void zero_grad(bool set_to_none = true) {
    torch::optim::Optimizer::zero_grad(set_to_none);
    reset_scale();
  }

  /// The gradients themselves stay as they are (on CUDA they are multiplied too).
  void scale_gradients(double factor) override { gradient_factor_ *= factor; }
  void reset_scale() noexcept override { gradient_factor_ = 1; }

  /// clip_grad_norm_() without its second pass over memory: reads the gradients of all parameters, as scaled by
  /// scale_gradients(), returns their norm, and has the next step() scale them down to `max_norm`. Same arguments.
  double clip_grad_norm(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);

  /// The state as it lies in memory; laid out anew by add_param_group() and whatever else changes the parameters.
  /// Undefined before the first step of a group, where nothing has been allocated.
  const std::vector<FlatState>& flat_state();

  /// Archives are torch::optim's: either reads what the other wrote.
  void save(torch::serialize::OutputArchive& archive) const final;
  void load(torch::serialize::InputArchive& archive) final;

  /// FusedOptions::capturable.
  bool capturable() const noexcept { return fused_options_.capturable; }
  /// For GraphedStep. A captured step() has been counted, but not done.
  void after_capture();
  /// For GraphedStep: learning rates go to the device, on the current stream, and the step is counted.
  void before_replay();
  /// Lets `fill` set state() and the groups' options anew, and lays the state out; all is as before when that throws.
  void replace_state(const std::function<void()>& fill);
  /// A parameter's state before its first step.
  virtual std::unique_ptr<torch::optim::OptimizerParamState> make_state() const = 0;

  /// As given to the constructor.
  const FusedOptions& fused_options() const noexcept { return fused_options_; }
  /// Whether parameters of that type have master weights here.
  bool has_master(at::ScalarType dtype) const noexcept;

  ~FusedOptimizer() override;
  FusedOptimizer(const FusedOptimizer&) = delete;
  FusedOptimizer& operator=(const FusedOptimizer&) = delete;

 protected:
  static constexpr std::size_t kMaster = 3;
  using StateTensors = std::array<at::Tensor, 4>;  ///< [kind]; the last is the master weight.

  /// A parameter that has a gradient, in one step.
  struct Update {
    at::Tensor parameter, gradient;  ///< Of the same type and, on the CPU, the same dense layout.
    StateTensors tensors;            ///< Of the same layout.
    torch::optim::OptimizerParamState* state = nullptr;
    bool fresh = false;  ///< This is its first step: the state is zero.

    /// On the CPU; null without a master weight.
    float* master() const { return tensors[kMaster].defined() ? tensors[kMaster].data_ptr<float>() : nullptr; }
  };

  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults, const FusedOptions& options);

  /// How many tensors a parameter's state has with these options.
  virtual std::size_t tensor_count(const torch::optim::OptimizerOptions& options) const = 0;
  virtual StateTensors tensors_of(const torch::optim::OptimizerParamState& state) const = 0;
  virtual void set_tensors(torch::optim::OptimizerParamState& state, const StateTensors& tensors) const = 0;
  /// All parameters of one group, type and device that have a gradient; counts their step.
  virtual void update(const torch::optim::OptimizerOptions& options, std::vector<Update>& updates,
                      double gradient_factor) = 0;
  template <class State>
  std::unique_ptr<torch::optim::OptimizerParamState> new_state() const {
    if (fused_options_.master_weights) return std::make_unique<WithMaster<State>>();
    return std::make_unique<State>();
  }
  template <class State, class Options>
  void read_as(torch::serialize::InputArchive& archive) {
    if (fused_options_.master_weights)
      torch::optim::serialize<WithMaster<State>, Options>(archive, *this);
    else
      torch::optim::serialize<State, Options>(archive, *this);
  }
  at::Tensor master_of(const torch::optim::OptimizerParamState& state) const;
  void set_master(torch::optim::OptimizerParamState& state, const at::Tensor& master) const;

  virtual void write(torch::serialize::OutputArchive& archive) const = 0;
  virtual void read(torch::serialize::InputArchive& archive) = 0;

  /// Adds to a state's count of steps, where it has one.
  virtual void add_steps(torch::optim::OptimizerParamState&, std::int64_t) const {}
  /// The group's learning rate as a scalar of the device, brought up to date.
  at::Tensor device_learning_rate(const torch::optim::OptimizerOptions& options, at::Device device);
  /// The state's step count as a scalar of the device, which begins with `steps`; the caller counts on.
  at::Tensor device_step(const torch::optim::OptimizerParamState& state, std::int64_t steps, at::Device device);

 private:
  friend class ShardedOptimizerBase;
  struct Layout;

  void update_masters(const torch::optim::OptimizerOptions& options, std::vector<Update>& updates, double factor);
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
