#include <ddpkit/parallel/activation_checkpoint.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

namespace ddpkit::detail {
namespace {

using torch::autograd::Engine, torch::autograd::SavedVariable, torch::autograd::SavedVariableHooks;

std::string describe(const at::Tensor& tensor) {
  return fmt::format("[{}] {} on {}", fmt::join(tensor.sizes(), ", "), c10::toString(tensor.scalar_type()),
                     tensor.device().str());
}

[[noreturn]] void throw_modified() {
  throw Error(
      "activation_checkpoint: a tensor that backward needs has been modified by an in-place operation after the "
      "function used it");
}

/// Ends the second run.
struct Stop {};

}  // namespace

/// The states of random generators.
class RandomState {
 public:
  explicit RandomState(const std::vector<at::Generator>& generators) {
    for (at::Generator generator : generators) {
      const std::lock_guard lock(generator.mutex());
      states_.emplace_back(generator, generator.get_state());
    }
  }
  void restore() {
    for (auto& [generator, state] : states_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }
  /// Returns the states of now of the same generators.
  RandomState now() const {
    std::vector<at::Generator> generators;
    for (const auto& state : states_) generators.push_back(state.first);
    return RandomState(generators);
  }

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

namespace {

/// Returns the CPU's generator and those of the GPUs of `tensors`.
std::vector<at::Generator> generators_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Generator> generators{at::detail::getDefaultCPUGenerator()};
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.is_cuda()) continue;
    const at::Generator& generator = at::globalContext().defaultGenerator(tensor.device());
    if (std::ranges::find(generators, generator) == generators.end()) generators.push_back(generator);
  }
  return generators;
}

}  // namespace

/// Autocast's settings on this thread.
class AutocastState {
 public:
  void restore(bool with_cache) const {
    for (std::size_t i = 0; i < kDevices.size(); ++i) {
      at::autocast::set_autocast_enabled(kDevices[i], devices_[i].first);
      at::autocast::set_autocast_dtype(kDevices[i], devices_[i].second);
    }
    at::autocast::set_autocast_cache_enabled(with_cache && cache_);
  }

 private:
  static constexpr std::array kDevices = {at::kCPU, at::kCUDA};
  static std::pair<bool, at::ScalarType> of(at::DeviceType device) {
    return {at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)};
  }
  std::array<std::pair<bool, at::ScalarType>, kDevices.size()> devices_ = {of(kDevices[0]), of(kDevices[1])};
  bool cache_ = at::autocast::is_autocast_cache_enabled();
};

namespace {

/// A function that runs on this thread under activation_checkpoint().
struct Run {
  CheckpointedCall* call;
  bool is_second;
  std::size_t next = 0;  ///< Number of tensors that this run has saved.
};

thread_local std::vector<Run> runs;  ///< The innermost is the last.

}  // namespace

/// One call of activation_checkpoint(). Owned by the tensors that the graph believes to have saved.
struct CheckpointedCall : std::enable_shared_from_this<CheckpointedCall> {
  /// A tensor that the first run has saved.
  struct Saved {
    std::string description;
    bool wanted = true;  ///< The graph still has it.
  };
  /// The same tensor in the second run.
  struct Recomputed {
    at::Tensor tensor;
    std::uint32_t version;  ///< When the run saved it.
  };

  CheckpointedCall(const ActivationCheckpointOptions& its_options, CheckpointScope::Function its_function,
                   const std::vector<at::Tensor>& tensors)
      : options(its_options),
        function(std::move(its_function)),
        random(options.preserve_rng_state ? generators_of(tensors) : std::vector<at::Generator>()) {
    for (const at::Tensor& tensor : tensors) inputs.emplace_back(tensor, /*is_output=*/false);
  }

  void run_again();
  /// Throws Stop after the last tensor that backward needs.
  void note_recomputed(std::size_t number, const at::Tensor& tensor);

  const ActivationCheckpointOptions options;
  const CheckpointScope::Function function;
  std::vector<SavedVariable> inputs;  ///< In another call of activation_checkpoint(), that call drops them.
  RandomState random;
  const AutocastState autocast;

  std::recursive_mutex mutex;                                            ///< Backward may use a thread per device.
  std::vector<Saved> saved;                                              ///< [number]
  std::vector<std::pair<c10::VariableVersion, std::uint32_t>> versions;  ///< Of the saved tensors, after the first run.
  std::unordered_map<std::size_t, Recomputed> recomputed;                ///< [number]
  std::size_t end = 0;       ///< Backward needs no tensor from this number on.
  bool is_complete = false;  ///< The second run has saved what backward needs.
};

namespace {

/// A tensor of the first run.
class DroppedTensor final : public SavedVariableHooks {
 public:
  explicit DroppedTensor(std::shared_ptr<CheckpointedCall> call) : call_(std::move(call)) {}
  ~DroppedTensor() override {
    const std::lock_guard lock(call_->mutex);
    call_->recomputed.erase(number_);
    if (number_ < call_->saved.size()) call_->saved[number_].wanted = false;
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    const std::lock_guard lock(call_->mutex);
    number_ = call_->saved.size();
    call_->saved.push_back({describe(tensor)});
    const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
    if (version.enabled()) call_->versions.emplace_back(version, version.current_version());
  }

  at::Tensor call_unpack_hook() override {
    const std::lock_guard lock(call_->mutex);
    if (!call_->recomputed.contains(number_)) call_->run_again();
    auto found = call_->recomputed.extract(number_);
    if (found.empty())
      throw Error(
          fmt::format("activation_checkpoint: the function saved a tensor {} in forward, but did not save it when "
                      "it ran again: both runs must compute the same",
                      call_->saved[number_].description));
    if (found.mapped().tensor._version() != found.mapped().version) throw_modified();
    return found.mapped().tensor;
  }

 private:
  const std::shared_ptr<CheckpointedCall> call_;
  std::size_t number_ = ~std::size_t{0};
};

/// A tensor of the second run, whose graph only a backward inside the function uses.
class KeptTensor final : public SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    tensor_ = tensor.detach();  // An output would own its node, which owns this object.
    Run& run = runs.back();
    run.call->note_recomputed(run.next++, tensor_);
  }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  at::Tensor tensor_;
};

/// LibTorch's engine, which also decides how autograd saves tensors.
class CheckpointEngine final : public Engine {
 public:
  CheckpointEngine() {
    // Starts the threads of only one engine in a process: LibTorch's, if a backward has run before.
    initialize_device_threads_pool();
    if (!thread_pool_shared_) start_device_threads();
  }
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (runs.empty()) return nullptr;
    if (runs.back().is_second) return std::make_unique<KeptTensor>();
    return std::make_unique<DroppedTensor>(runs.back().call->shared_from_this());
  }

  static void install() {
    static const bool once = [] {
      if (&get_default_engine() != &get_base_engine())
        throw Error(
            "activation_checkpoint: another autograd engine than LibTorch's is in use in this process (Python?)");
      // Never destroyed: its threads may run until the process ends.
      torch::autograd::set_default_engine_stub([]() -> Engine& {
        static auto* engine = new CheckpointEngine;
        return *engine;
      });
      return true;
    }();
    static_cast<void>(once);
  }
};

}  // namespace

void CheckpointedCall::note_recomputed(std::size_t number, const at::Tensor& tensor) {
  if (is_complete) return;
  if (options.determinism_check) {
    const std::string description = describe(tensor);
    if (number >= saved.size() || description != saved[number].description)
      throw Error(
          fmt::format("activation_checkpoint: tensor number {} that the function saves was {} in forward, but is {} "
                      "when it runs again: both runs must compute the same",
                      number, number < saved.size() ? saved[number].description : "absent", description));
  }
  if (number < saved.size() && saved[number].wanted)
    recomputed.try_emplace(number, Recomputed{tensor, static_cast<std::uint32_t>(tensor._version())});
  if (number + 1 < end) return;
  is_complete = true;
  if (options.early_stop) throw Stop{};
}

void CheckpointedCall::run_again() {
  for (const auto& [counter, version] : versions) {
    if (counter.current_version() != version) throw_modified();
  }
  std::vector<at::Tensor> tensors;  // Not in the first run's graph.
  for (const SavedVariable& input : inputs) {
    const at::Tensor tensor = input.unpack();
    tensors.push_back(tensor.defined() ? tensor.detach().set_requires_grad(tensor.requires_grad()) : tensor);
  }
  end = saved.size();
  while (end > 0 && !saved[end - 1].wanted) --end;
  is_complete = false;

  RandomState random_before = random.now();
  const AutocastState autocast_before;
  const at::AutoGradMode with_gradients(true);
  const std::size_t depth = runs.size();
  const auto leave = [&] {
    runs.resize(depth);
    random_before.restore();
    autocast_before.restore(/*with_cache=*/true);
  };
  random.restore();
  // Nothing would clear the cache of casts before the weights change.
  autocast.restore(/*with_cache=*/false);
  runs.push_back({.call = this, .is_second = true});
  try {
    function(tensors);
  } catch (...) {
    leave();
    // Code between here and Stop may have replaced it by another exception.
    if (is_complete && options.early_stop) return;
    throw;
  }
  leave();
}

CheckpointScope::CheckpointScope(const ActivationCheckpointOptions& options, Function again,
                                 const std::vector<at::Tensor>& inputs) {
  CheckpointEngine::install();
  call_ = std::make_shared<CheckpointedCall>(options, std::move(again), inputs);
  runs.push_back({.call = call_.get(), .is_second = false});
}

CheckpointScope::~CheckpointScope() {
  runs.pop_back();
  for (auto& [counter, version] : call_->versions) version = counter.current_version();
}

bool records_gradients() { return at::GradMode::is_enabled(); }

}  // namespace ddpkit::detail
