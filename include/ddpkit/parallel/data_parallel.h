// Tier 2: torch/nn/module.h.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddpkit/comm/arena_stats.h>
#include <ddpkit/parallel/pytree.h>

namespace ddpkit {

/// Options of DataParallel.
struct DataParallelOptions {
  /// One replica each, the first of them gathers: all CPUs, or all CUDA devices, of which one may be named several
  /// times. Empty: all GPUs where the module is on one, else `replicas` times the CPU.
  std::vector<c10::Device> devices = {};
  /// CPU replicas, where `devices` is empty. Empty: one for each core that this process may use.
  std::optional<int> replicas = std::nullopt;
  /// Threads inside a replica's operators. Empty: its share of the cores, at least 1.
  std::optional<int> threads_per_replica = std::nullopt;
  /// train_step() and backward reduce gradients in buckets of about this many MiB.
  double bucket_cap_mb = 25;
  /// The first bucket is smaller, so that reducing starts early.
  double first_bucket_cap_mb = 1;
  /// Every forward starts from the module's buffers (batch-norm statistics and the like) in all replicas.
  bool broadcast_buffers = true;
  /// With replicas on the CPU: this process's large CPU tensors come from memory that is kept for reuse, as
  /// DistributedDataParallel's do. A thread that gets them from malloc faults their pages in anew each step, and
  /// several do in each other's way. A child made by fork() without exec() cannot see them. Not where another arena is
  /// in force.
  bool arena = true;
  /// The most memory that the arena takes, in MiB; what does not fit goes to malloc. Empty: 1 GiB or eight times the
  /// gradients of all replicas, whichever is more, but no more than half the host's free memory.
  std::optional<double> arena_mb = std::nullopt;
};

/// The part of DataParallel that does not depend on the module's type.
class DataParallelBase {
 public:
  /// Where each replica is. [replica]
  const std::vector<c10::Device>& devices() const noexcept;
  /// How many replicas there are; a batch of fewer samples runs on fewer.
  int replicas() const noexcept;
  /// Threads inside a replica's operators.
  int threads_per_replica() const noexcept;
  /// Gradient buckets: indices among the parameters that want a gradient. [bucket][position]
  const std::vector<std::vector<std::size_t>>& buckets() const noexcept;

  /// What the arena holds; empty without one.
  std::optional<ArenaStats> arena() const;

  /// Clones the module anew. Weights, buffers, requires_grad and training mode are followed without it; needed after
  /// anything else of the module has changed: a submodule, a member, an option of a layer.
  void replicate();

 protected:
  class Impl;
  using Tensors = std::vector<at::Tensor>;

  DataParallelBase(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options);
  ~DataParallelBase() = default;

  torch::nn::Module& replica(int index) const;
  /// Scatters `inputs`, calls `forward(replica, its part)` in the replicas' threads, gathers what they return. With a
  /// graph, if gradients are on, that leads from the outputs to `inputs` and the module's parameters.
  Tensors run_forward(const Tensors& inputs, const std::function<Tensors(int, const Tensors&)>& forward);
  /// Scatters `batch`, calls `loss(replica, its part)` and backward in the replicas' threads, adds the gradients of the
  /// mean loss to the module's, returns that loss.
  at::Tensor run_step(const Tensors& batch, const std::function<at::Tensor(int, const Tensors&)>& loss);

 private:
  std::shared_ptr<Impl> impl_;  ///< Shared with the graphs of gathered outputs.
};

/// Trains one module on many devices of one process as if one device saw the whole batch. Each device has a replica
/// that is cloned once, and a thread that is kept. Replicas on the module's device share its weights; others are given
/// them before each forward. On CUDA devices all is ordered by streams, the caller's current ones included: no call
/// waits for a device, except to copy from pageable memory.
///
///     ddpkit::DataParallel dp(model, {.replicas = 2});
///     auto loss = dp.train_step(batch, [](Net& net, auto& part) {
///       return torch::cross_entropy_loss(net.forward(part.data), part.target);
///     });
///     optimizer.step();  // Of model->parameters(): gradients are in the module itself.
///
/// The module stays the caller's own, as with DistributedDataParallel. It and its children need clone():
/// torch::nn::Cloneable or torch::nn::Sequential. One call at a time. Not copyable while a call runs.
///
/// Batches and arguments are cut along dim 0 into parts whose sizes differ by at most one, wherever with_tensors()
/// finds tensors; those of no dimensions, and what is not a tensor, go to every replica. Throws InvalidArgument when
/// tensors differ in size(0). An exception in a replica comes out as an Error that names the replica and its device,
/// with the original nested in it; what the replicas have done in that call is dropped.
template <class M>
class DataParallel : public DataParallelBase {
 public:
  /// Throws InvalidArgument for a module that cannot be cloned, or is not on the first device.
  explicit DataParallel(std::shared_ptr<M> module, const DataParallelOptions& options = {})
      : DataParallelBase(module, options), module_(std::move(module)) {}

  /// A module made with TORCH_MODULE.
  template <class Holder>
  requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>
  explicit DataParallel(const Holder& holder, const DataParallelOptions& options = {})
      : DataParallel(holder.ptr(), options) {}

  /// The module's forward on the joined batch: outputs are joined along dim 0 on the first device, in the order of the
  /// batch. Scalars become a vector of one a replica, unless there is one replica alone, and what is not a tensor is
  /// replica 0's, both as in Python. Backward through the outputs runs in the replicas' threads. Throws Error from a
  /// backward with create_graph, and from a second one without retain_graph.
  template <class... Args>
  auto forward(const Args&... args) {
    using Outputs = std::decay_t<decltype(std::declval<M&>().forward(std::declval<std::decay_t<const Args&>&>()...))>;
    static_assert(!std::is_void_v<Outputs>, "DataParallel gathers what forward returns: it must return something");
    const std::tuple<std::decay_t<const Args&>...> all(args...);
    std::vector<std::optional<Outputs>> outputs(static_cast<std::size_t>(replicas()));  // [replica]
    const Tensors gathered = run_forward(tensors_in(all), [&](int index, const Tensors& part) {
      auto mine = with_tensors(all, part);
      auto& output = outputs[static_cast<std::size_t>(index)];
      output.emplace(std::apply([&](auto&... parts) { return module_of(index).forward(parts...); }, mine));
      return tensors_in(*output);
    });
    return with_tensors(*outputs[0], gathered);
  }
  template <class... Args>
  auto operator()(const Args&... args) {
    return forward(args...);
  }

  /// Forward, loss and backward of each part of `batch` in its replica's thread; nothing but gradients moves between
  /// devices. `loss_fn(M& replica, Batch& part)` returns a scalar, the mean loss over the samples of its part; it is
  /// called in several threads at once. Returns the mean loss over the batch, and adds its gradient to the module's
  /// parameters, as backward() would: zero them as ever. Throws InvalidArgument for an empty batch, where gradients are
  /// off, and where a loss is no scalar or has no graph.
  template <class Batch, class Loss>
  at::Tensor train_step(const Batch& batch, Loss&& loss_fn) {
    static_assert(std::convertible_to<std::invoke_result_t<Loss&, M&, Batch&>, at::Tensor>,
                  "loss_fn(M& replica, Batch& part) returns the mean loss over its part, a tensor");
    return run_step(tensors_in(batch), [&](int index, const Tensors& part) -> at::Tensor {
      Batch mine = with_tensors(batch, part);
      return loss_fn(module_of(index), mine);
    });
  }

  /// The module as it was passed: replica 0's weights are its own.
  M& module() noexcept { return *module_; }
  const M& module() const noexcept { return *module_; }
  const std::shared_ptr<M>& module_ptr() const noexcept { return module_; }

 private:
  M& module_of(int index) const { return static_cast<M&>(replica(index)); }

  std::shared_ptr<M> module_;
};

template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> DataParallel(const Holder&)
->DataParallel<typename Holder::ContainedType>;
template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> DataParallel(const Holder&,
                                                                                      DataParallelOptions)
->DataParallel<typename Holder::ContainedType>;

}  // namespace ddpkit
