// Tier 2: torch/optim/optimizer.h.
#pragma once

#include <torch/optim/optimizer.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ddpkit/optim/clip_grad_norm.h>
#include <ddpkit/optim/gradient_scaling.h>

namespace ddpkit::optim {

/// What torch::optim's options have no room for.
struct FusedOptions {
  /// Go up the gradient instead of down.
  bool maximize = false;
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

  /// Lets `fill` set state() and the groups' options anew, and lays the state out; all is as before when that throws.
  void replace_state(const std::function<void()>& fill);
  /// A parameter's state before its first step.
  virtual std::unique_ptr<torch::optim::OptimizerParamState> make_state() const = 0;

  const FusedOptions& fused_options() const noexcept { return fused_options_; }

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
  virtual StateTensors tensors_of(const torch::optim::OptimizerParamState& state) const = 0;
  virtual void set_tensors(torch::optim::OptimizerParamState& state, const StateTensors& tensors) const = 0;
  /// All parameters of one group, type and device that have a gradient; counts their step.
  virtual void update(const torch::optim::OptimizerOptions& options, std::vector<Update>& updates,
                      double gradient_factor) = 0;
  virtual void write(torch::serialize::OutputArchive& archive) const = 0;
  virtual void read(torch::serialize::InputArchive& archive) = 0;

 private:
  friend class ShardedOptimizerBase;
  struct Layout;

  Layout& layout();
  void adopt(Layout& layout);

  FusedOptions fused_options_;
  double gradient_factor_ = 1;
  std::unique_ptr<Layout> layout_;
};

}  // namespace ddpkit::optim
