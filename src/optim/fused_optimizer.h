// Tier 2: torch/optim/optimizer.h. The state of a fused optimizer in memory. fused_optimizer.cpp: layout, step,
// archives; device_scalars.cpp: captured steps.
#pragma once

#include <ddpkit/optim/fused_optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "optim/algorithm.h"

namespace ddpkit::optim {

class ShardMemory;

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

/// Not thread-safe.
class FusedOptimizer::Impl {
 public:
  using StateTensors = Algorithm::StateTensors;
  using AnyOptions = torch::optim::OptimizerOptions;
  using AnyState = torch::optim::OptimizerParamState;

  Impl(const Algorithm& algorithm, const FusedOptions& options);
  ~Impl();
  static Impl& of(const FusedOptimizer& optimizer) noexcept { return *optimizer.impl_; }
  /// Checks the options of groups, and returns the groups. The constructor of LibTorch 2.15 replaces options of another
  /// optimizer by the defaults.
  const std::vector<torch::optim::OptimizerParamGroup>& checked(
      const std::vector<torch::optim::OptimizerParamGroup>& groups) const;
  /// Call once. Checks the options and removes duplicate parameters.
  void attach(torch::optim::Optimizer& optimizer);

  const Algorithm& algorithm() const noexcept { return algorithm_; }
  const FusedOptions& options() const noexcept { return options_; }
  void step(double factor);
  /// Call before the first step. The state is in `memory`, which must outlive this object.
  void use_memory(ShardMemory& memory) noexcept { memory_ = &memory; }
  void save(torch::serialize::OutputArchive& archive);
  void load(torch::serialize::InputArchive& archive);

  /// Returns the state as it is in memory. add_param_group() and other changes of the parameters rebuild it. Tensors
  /// are undefined before the first step of a group.
  const std::vector<FlatState>& flat_state();
  /// Returns memory for the state tensors of each parameter, in the order of the groups. What the optimizer already has
  /// keeps its values.
  std::vector<StateTensors> state_memory();
  /// Call after changes of states' step counts.
  void set_device_steps();
  /// Returns the state of a parameter before its first step.
  std::unique_ptr<AnyState> make_state() const { return algorithm_.make_state(options_.master_weights); }
  /// Returns whether this optimizer keeps master weights for parameters of type `dtype`.
  bool has_master(at::ScalarType dtype) const noexcept;
  /// Calls `fill`, which sets state() and the groups' options. Then moves the state to its previous memory, for
  /// parameters that are the same. If that throws, nothing changes.
  void replace_state(const std::function<void()>& fill);

  /// Begins a capture. Captured steps run only when they are replayed. During the capture, step() throws
  /// InvalidArgument for a parameter without state: each replay would reset the state.
  void begin_capture();
  void end_capture();
  /// Copies learning rates to the device, on the current stream, and counts the captured steps. Throws InvalidArgument
  /// if parameters, groups, or options other than the learning rate differ from the captured ones.
  void before_replay();
  /// Returns the group's learning rate as a scalar on the device.
  at::Tensor device_learning_rate(const AnyOptions& options, at::Device device);

 private:
  struct Capture;
  struct Layout;

  auto& param_groups() { return optimizer_->param_groups(); }
  auto& states() { return optimizer_->state(); }
  void update(const AnyOptions& options, Layout& layout, double factor);
  Layout& layout();
  bool fits_layout();
  void drop_duplicates();
  void adopt(Layout& layout);
  void place(Layout& layout);
  at::Tensor device_steps(const at::Tensor& parameter, AnyState& state);

  const Algorithm& algorithm_;
  FusedOptions options_;
  ShardMemory* memory_ = nullptr;
  torch::optim::Optimizer* optimizer_ = nullptr;
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<Capture> capture_;  ///< Copies of host values in device memory; null before the first.
};

/// The location of each parameter's state.
struct FusedOptimizer::Impl::Layout {
  struct Slot {
    at::Tensor parameter;
    std::vector<std::int64_t> strides;  ///< Strides of the parameter when the layout was created.
    at::ScalarType dtype;
    at::Device device;
    std::size_t flat = 0;
    std::int64_t offset = 0;
    bool dense = false;         ///< The parameter is one contiguous range. The state has the same order of elements.
    StateTensors tensors = {};  ///< Views of the flat state. [kind]

    bool fits(const at::Tensor& other) const {
      return parameter.is_same(other) && other.scalar_type() == dtype && other.device() == device &&
             other.strides() == at::IntArrayRef(strides);
    }
  };
  std::vector<std::vector<Slot>> slots;  ///< [group][param]
  std::vector<std::size_t> counts;       ///< State tensors per parameter. [group]
  std::vector<FlatState> flats;
  std::vector<std::int64_t> lengths;       ///< In elements. [flat]
  std::vector<bool> masters;               ///< Whether master weights exist. [flat]
  std::vector<Algorithm::Update> updates;  ///< Kept to reuse its memory.
  ShardMemory* memory = nullptr;           ///< Null: LibTorch's.

  void add(std::size_t group, std::size_t index, const at::Tensor& parameter, bool master);
  bool is_stateless(const Slot& slot) const { return counts[flats[slot.flat].group] == 0 && !masters[slot.flat]; }
  /// Returns the slot's part of the flat state. Allocates zeros on first use.
  StateTensors& tensors_of(Slot& slot);
};

/// Learning rates and step counts that the kernels of a captured step() read. The graph holds their addresses, so the
/// tensors live as long as the optimizer. They are written only outside a capture: a write within a capture would be
/// replayed.
struct FusedOptimizer::Impl::Capture {
  /// A number of the host, stored in device memory.
  struct Number {
    at::Tensor tensor;
    double value = 0;
  };
  std::map<std::pair<std::size_t, at::DeviceIndex>, Number> learning_rates;  ///< Key: group and device.
  std::unordered_map<const void*, at::Tensor> steps;                         ///< Key: parameter.

  bool capturing = false;
  std::vector<at::Tensor> parameters;  ///< Parameters of the captured steps; one entry per captured step.
  std::vector<const void*> places;     ///< Memory addresses of the parameters at capture. [parameters]
  const Layout* layout = nullptr;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;  ///< [group]
};

/// Returns the algorithm of the torch::optim optimizer that has these options.
template <class Options>
const Algorithm& algorithm_of();

template <class Options>
FusedOptimizerWith<Options>::FusedOptimizerWith(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                                                const Options& defaults, const FusedOptions& options)
    : FusedOptimizer(param_groups, std::make_unique<Options>(defaults),
                     std::make_unique<Impl>(algorithm_of<Options>(), options)) {}

}  // namespace ddpkit::optim
