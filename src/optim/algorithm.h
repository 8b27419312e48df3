// Tier 2: torch/optim/optimizer.h. The parts that differ between the fused optimizers.
#pragma once

#include <ATen/ops/full.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <typeinfo>
#include <utility>
#include <vector>

#include "optim/optimizer_archive.h"
#include "tensor/parallel_for.h"
#include "tensor/tensor_memory.h"

namespace ddpkit::optim {

/// The float32 copy of a parameter, as part of its state; see FusedOptions::master_weights.
class MasterWeight {
 public:
  at::Tensor master_param;  ///< float32, the parameter's shape.
};

/// torch::optim's state of a parameter, with a master weight.
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

/// The state and the update of one optimizer of torch::optim. Stateless.
class Algorithm {
 public:
  using AnyOptions = torch::optim::OptimizerOptions;
  using AnyState = torch::optim::OptimizerParamState;
  static constexpr std::size_t kMaster = 3;
  using StateTensors = std::array<at::Tensor, kMaster + 1>;  ///< [kind]; the last is the master weight.

  /// Old blocks of a parameter's state, for an update that is to be undone wherever the process ends.
  struct UndoLog {
    StateTensors saved;
    std::atomic<std::uint64_t>* updates = nullptr;  ///< Number of the update before which a block was saved. [block]
    std::uint64_t update = 0;                       ///< Number of this update.

    /// Saves block `block` of `tensors`: elements [begin, begin + count).
    void save(const StateTensors& tensors, std::size_t begin, std::size_t count) const {
      for (std::size_t k = 0; k < tensors.size(); ++k) {
        if (!tensors[k].defined()) continue;
        const std::size_t size = tensors[k].element_size();
        std::memcpy(advance(saved[k].data_ptr(), begin, size), advance(tensors[k].const_data_ptr(), begin, size),
                    count * size);
      }
      updates[begin / kBlockElements].store(update);
    }
  };

  /// The update of one parameter with a gradient in one step.
  struct Update {
    at::Tensor original;             ///< The tensor in the parameter group.
    at::Tensor parameter, gradient;  ///< Of the same type and, on the CPU, the same dense layout.
    StateTensors tensors;            ///< Of the same layout.
    AnyState* state = nullptr;
    bool fresh = false;     ///< First step: the state is zero.
    at::Tensor steps = {};  ///< With FusedOptions::capturable, on a device: the step count before this step.
    std::optional<UndoLog> undo = std::nullopt;
  };

  virtual ~Algorithm() = default;
  /// Throws InvalidArgument for options of another optimizer and for values out of range.
  virtual void check(const AnyOptions& options) const = 0;
  /// Returns the number of state tensors per parameter with these options.
  virtual std::size_t tensor_count(const AnyOptions& options) const = 0;
  virtual StateTensors tensors_of(const AnyState& state) const = 0;
  virtual void set_tensors(AnyState& state, const StateTensors& tensors) const = 0;
  /// Returns the step count of a state; null if it has none.
  virtual std::int64_t* steps_of(AnyState&) const { return nullptr; }
  /// Updates all parameters of one group, type and device that have a gradient, and increments their step counts.
  /// `rate`: the learning rate on the device with FusedOptions::capturable, else undefined.
  virtual void update(const AnyOptions& options, std::vector<Update>& updates, double gradient_factor,
                      const at::Tensor& rate) const = 0;

  virtual std::unique_ptr<AnyState> make_state(bool master) const = 0;
  virtual bool same_options(const AnyOptions& a, const AnyOptions& b) const = 0;
  virtual void write(torch::serialize::OutputArchive& archive, const torch::optim::Optimizer& optimizer) const = 0;
  virtual void read(torch::serialize::InputArchive& archive, torch::optim::Optimizer& optimizer, bool master) const = 0;
};

/// The type-dependent part.
template <class Options, class State>
class AlgorithmOf : public Algorithm {
 public:
  std::unique_ptr<AnyState> make_state(bool master) const final {
    if (master) return std::make_unique<WithMaster<State>>();
    return std::make_unique<State>();
  }
  StateTensors tensors_of(const AnyState& state) const final {
    StateTensors tensors = own_tensors_of(static_cast<const State&>(state));
    if (has_master(state)) tensors[kMaster] = static_cast<const WithMaster<State>&>(state).master_param;
    return tensors;
  }
  void set_tensors(AnyState& state, const StateTensors& tensors) const final {
    set_own_tensors(static_cast<State&>(state), tensors);
    if (has_master(state)) static_cast<WithMaster<State>&>(state).master_param = tensors[kMaster];
  }
  bool same_options(const AnyOptions& a, const AnyOptions& b) const final {
    check(a);
    check(b);
    return static_cast<const Options&>(a) == static_cast<const Options&>(b);
  }
  void write(torch::serialize::OutputArchive& archive, const torch::optim::Optimizer& optimizer) const final {
    torch::optim::serialize<State, Options>(archive, optimizer);
  }
  void read(torch::serialize::InputArchive& archive, torch::optim::Optimizer& optimizer, bool master) const final {
    master ? read_archive<WithMaster<State>, Options>(archive, optimizer)
           : read_archive<State, Options>(archive, optimizer);
  }

 private:
  static bool has_master(const AnyState& state) { return typeid(state) == typeid(WithMaster<State>); }
  /// Read and write the state tensors, except the master weight.
  virtual StateTensors own_tensors_of(const State& state) const = 0;
  virtual void set_own_tensors(State& state, const StateTensors& tensors) const = 0;
};

/// Elements [begin, begin + count) of an update, for one call of a CPU kernel.
struct UpdateBlock {
  kernels::DataType dtype;  ///< Type of the parameter and the gradient.
  std::size_t begin, count;

  /// Returns null for an undefined tensor.
  void* of(const at::Tensor& tensor) const {
    return tensor.defined() ? advance(tensor.data_ptr(), begin, tensor.element_size()) : nullptr;
  }
};

/// Calls `body(index, update, block)` for all elements of all updates, on LibTorch's threads.
template <class Body>
void for_update_blocks(const std::vector<Algorithm::Update>& updates, const Body& body) {
  std::vector<std::size_t> numels;
  for (const Algorithm::Update& update : updates) numels.push_back(static_cast<std::size_t>(update.parameter.numel()));
  for_blocks(numels, [&](std::size_t index, std::size_t begin, std::size_t count) {
    const Algorithm::Update& update = updates[index];
    const std::size_t most = update.undo ? kBlockElements : count;
    for (const std::size_t end = begin + count; begin < end; begin += most) {
      const std::size_t some = std::min(most, end - begin);
      if (update.undo) update.undo->save(update.tensors, begin, some);
      body(index, update, UpdateBlock{*dtype_of(update.parameter.scalar_type()), begin, some});
    }
  });
}

/// Returns the divisor of the gradients for LibTorch's device kernels. Empty for 1.
inline std::optional<at::Tensor> scale_of(double factor, at::Device device) {
  if (std::abs(factor) == 1) return std::nullopt;
  return at::full({}, 1 / std::abs(factor), at::device(device).dtype(at::kFloat));
}

}  // namespace ddpkit::optim
