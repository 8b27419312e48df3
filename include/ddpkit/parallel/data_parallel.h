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
  /// One replica per device; the first device gathers. All CPUs or all CUDA devices; a CUDA device may be listed
  /// several times. Empty: all GPUs if the module is on a GPU, otherwise `replicas` times the CPU.
  std::vector<c10::Device> devices = {};
  /// Number of CPU replicas if `devices` is empty. Empty: one per core that this process may use.
  std::optional<int> replicas = std::nullopt;
  /// Threads for the operators of one replica. Empty: cores / replicas, at least 1.
  std::optional<int> threads_per_replica = std::nullopt;
  /// Size of the gradient buckets of train_step() and backward, in MiB.
  double bucket_cap_mb = 25;
  /// Size of the first bucket, in MiB. It is smaller so that the reduction starts early.
  double first_bucket_cap_mb = 1;
  /// Copy the module's buffers (batch-norm statistics and others) to all replicas before every forward.
  bool broadcast_buffers = true;
  /// With CPU replicas: allocate this process's large CPU tensors from an arena that reuses memory, as in
  /// DistributedDataParallel. malloc would cause page faults in each step, which slow each other down on several
  /// threads. A child made by fork() without exec() cannot read the arena. No effect if another arena is active.
  bool arena = true;
  /// Maximum size of the arena, in MiB. Larger requests go to malloc. Empty: 1 GiB or eight times the gradients of all
  /// replicas, whichever is more, but at most half of the host's free memory.
  std::optional<double> arena_mb = std::nullopt;
};

/// The part of DataParallel that does not depend on the module's type.
class DataParallelBase {
 public:
  /// Returns the device of each replica. [replica]
  const std::vector<c10::Device>& devices() const noexcept;
  /// Returns the number of replicas. A batch with fewer samples uses fewer replicas.
  int replicas() const noexcept;
  /// Returns the number of threads for the operators of one replica.
  int threads_per_replica() const noexcept;
  /// Returns the gradient buckets: indices among the parameters with requires_grad. [bucket][position]
  const std::vector<std::vector<std::size_t>>& buckets() const noexcept;

  /// Returns statistics of the arena; empty without an arena.
  std::optional<ArenaStats> arena() const;

  /// Clones the module again. Changes of weights, buffers, requires_grad and training mode do not need it. Call it
  /// after other changes of the module: a submodule, a member, an option of a layer.
  void replicate();

 protected:
  class Impl;
  using Tensors = std::vector<at::Tensor>;  ///< In the order of tree_leaves().

  /// See DataParallel.
  DataParallelBase(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options);
  ~DataParallelBase() = default;

  /// Returns the module of replica `index`.
  torch::nn::Module& replica(int index) const;
  /// Scatters `inputs`, calls `forward(replica, part)` on the replicas' threads, and gathers the results. If gradients
  /// are enabled, the graph of the outputs leads to `inputs` and to the module's parameters.
  Tensors run_forward(const Tensors& inputs, const std::function<Tensors(int, const Tensors&)>& forward);
  /// Scatters `batch`, calls `loss(replica, part)` and backward on the replicas' threads, and adds the gradients of the
  /// mean loss to the module's gradients. Returns the mean loss.
  at::Tensor run_step(const Tensors& batch, const std::function<at::Tensor(int, const Tensors&)>& loss);

 private:
  std::shared_ptr<Impl> impl_;  ///< Shared with the graphs of gathered outputs.
};

/// Trains one module on several devices of one process with the result of one device that has the whole batch. Each
/// device has a replica, cloned once, and a thread. Replicas on the module's device share its weights; the others
/// receive the weights before each forward. On CUDA, everything is ordered by streams, including the caller's current
/// streams. No call waits for a device, except to copy from pageable memory.
///
///     ddpkit::DataParallel dp(model, {.replicas = 2});
///     auto loss = dp.train_step(batch, [](Net& net, auto& part) {
///       return torch::cross_entropy_loss(net.forward(part.data), part.target);
///     });
///     optimizer.step();  // Of model->parameters(): gradients are in the module itself.
///
/// The caller keeps using the module, as with DistributedDataParallel. The module and its children need clone():
/// torch::nn::Cloneable or torch::nn::Sequential. Only one call at a time. Do not copy while a call runs.
///
/// Batches and arguments are split along dim 0 into parts whose sizes differ by at most one. tree_map() finds the
/// tensors. Zero-dimensional tensors and other values go to every replica. Throws InvalidArgument if tensors differ in
/// size(0). An exception in a replica is thrown as an Error that names the replica and its device, with the original
/// exception nested. The results of all replicas of that call are then dropped.
template <class M>
class DataParallel : public DataParallelBase {
 public:
  /// Throws InvalidArgument if the module cannot be cloned, or is not on the first device.
  explicit DataParallel(std::shared_ptr<M> module, const DataParallelOptions& options = {})
      : DataParallelBase(module, options), module_(std::move(module)) {}

  /// Takes a module made with TORCH_MODULE.
  template <class Holder>
  requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>
  explicit DataParallel(const Holder& holder, const DataParallelOptions& options = {})
      : DataParallel(holder.ptr(), options) {}

  /// Runs the module's forward on the whole batch. Outputs are concatenated along dim 0 on the first device, in the
  /// order of the batch. As in Python, scalars become a vector with one element per replica, unless there is one
  /// replica, and other values come from replica 0. Backward through the outputs runs on the replicas' threads. Throws
  /// Error for a backward with create_graph, and for a second backward without retain_graph.
  template <class... Args>
  auto forward(const Args&... args) {
    using Outputs = std::decay_t<decltype(std::declval<M&>().forward(std::declval<std::decay_t<const Args&>&>()...))>;
    static_assert(!std::is_void_v<Outputs>, "DataParallel gathers what forward returns: it must return something");
    const std::tuple<std::decay_t<const Args&>...> all(args...);
    std::vector<std::optional<Outputs>> outputs(static_cast<std::size_t>(replicas()));  // [replica]
    const Tensors gathered = run_forward(tree_leaves(all), [&](int index, const Tensors& part) {
      auto mine = tree_unflatten(all, part);
      auto& output = outputs[static_cast<std::size_t>(index)];
      output.emplace(std::apply([&](auto&... parts) { return module_of(index).forward(parts...); }, mine));
      return tree_leaves(*output);
    });
    return tree_unflatten(*outputs[0], gathered);
  }
  /// Same as forward().
  template <class... Args>
  auto operator()(const Args&... args) {
    return forward(args...);
  }

  /// Runs forward, loss and backward of each part of `batch` on its replica's thread. Only gradients are copied between
  /// devices. `loss_fn(M& replica, Batch& part)` returns a scalar: the mean loss over the samples of its part. It is
  /// called on several threads at once. Returns the mean loss over the batch, and adds its gradient to the module's
  /// parameters, as backward() does; call zero_grad() as usual. Throws InvalidArgument for an empty batch, if gradients
  /// are disabled, and if a loss is not a scalar or has no graph.
  template <class Batch, class Loss>
  at::Tensor train_step(const Batch& batch, Loss&& loss_fn) {
    static_assert(std::convertible_to<std::invoke_result_t<Loss&, M&, Batch&>, at::Tensor>,
                  "loss_fn(M& replica, Batch& part) returns the mean loss over its part, a tensor");
    return run_step(tree_leaves(batch), [&](int index, const Tensors& part) -> at::Tensor {
      Batch mine = tree_unflatten(batch, part);
      return loss_fn(module_of(index), mine);
    });
  }

  /// Returns the module that was passed. Replica 0 has the module's weights.
  M& module() noexcept { return *module_; }
  const M& module() const noexcept { return *module_; }  ///< The same module.
  /// Returns a pointer to the module. The wrapper and its caller own the module together.
  const std::shared_ptr<M>& module_ptr() const noexcept { return module_; }

 private:
  M& module_of(int index) const { return static_cast<M&>(replica(index)); }

  std::shared_ptr<M> module_;
};

/// DataParallel of a holder has the type of the holder's module.
template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> DataParallel(const Holder&)
->DataParallel<typename Holder::ContainedType>;
/// DataParallel of a holder has the type of the holder's module.
template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> DataParallel(const Holder&,
                                                                                      DataParallelOptions)
->DataParallel<typename Holder::ContainedType>;

}  // namespace ddpkit
