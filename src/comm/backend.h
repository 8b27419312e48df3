// Tier 2: c10d's Backend.hpp. The contract between ProcessGroup and its backends.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddpkit/comm/environment.h>

#include "comm/agreement.h"
#include "comm/guard.h"
#include "comm/trace/event_ring.h"

namespace ddpkit {

class ProcessGroup;
class SymmetricMemory;

/// Every call of a group after shutdown() throws this error.
inline constexpr const char* kShutDown = "the process group was shut down: create another group";

/// What ddpkit needs beyond c10d::Backend. A backend of c10d is inside a ForwardingBackend.
class Backend : public c10d::Backend {
 public:
  template <class T>
  using Ptr = c10::intrusive_ptr<T>;
  using WorkPtr = Ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  using c10d::Backend::Backend;

  /// Returns the backend of a group.
  static const Ptr<Backend>& of(const ProcessGroup& group) noexcept;
  /// Collective. Returns another group of the same ranks, for CPU tensors. It ends and fails with `group`, as a result
  /// of split().
  static ProcessGroup on_hosts(const ProcessGroup& group);
  /// Returns `backend` itself if it is a Backend; otherwise a ForwardingBackend for the group's `device`.
  static Ptr<Backend> adopt(Ptr<c10d::Backend> backend, at::Device device);

  /// Returns the backend that ProcessGroup::backend() shows to callers.
  virtual Ptr<c10d::Backend> native() { return Ptr<c10d::Backend>::reclaim_copy(this); }
  /// Ends the collectives of all ranks. The other ranks throw `reason`.
  virtual void abort_group(const std::string& reason) noexcept = 0;
  void abort() override { abort_group("the program called abort()"); }
  /// Waits up to `limit` until this rank's collectives have ended and all ranks have called end(). Then releases what
  /// other ranks use, and returns an empty string. Otherwise returns what was missing, and changes nothing.
  virtual std::string end(std::chrono::milliseconds limit) = 0;
  /// Records that this rank leaves the group. Called before the other ranks can detect it.
  virtual void leave() noexcept {}
  /// Throws the group's failure, if there is one. In an elastic group, only collectives throw it.
  virtual void check() = 0;
  /// Creates the backend of a group of `ranks` (rank numbers of this group). Collective among them. `part`: rank, world
  /// size and place on the host in the new group.
  virtual Ptr<Backend> subgroup(const Ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                const LaunchEnvironment& part) = 0;
  /// See InitOptions::elastic. Collective. Only for the backends and ranks that init_process_group() allows.
  virtual void set_elastic(const Ptr<c10d::Store>& store, const LaunchEnvironment& environment);
  virtual bool is_elastic() const noexcept { return false; }
  struct Remainder {
    Ptr<Backend> backend;
    std::vector<int> old_rank_of;  ///< Numbers of its ranks in this group. [rank]
  };
  /// See ProcessGroup::shrink().
  virtual Remainder shrink(int min_ranks);
  /// This rank's number in messages.
  virtual int name() const noexcept { return rank_; }
  /// The step before which new ranks join; see Joining. Null if new ranks cannot join.
  virtual std::atomic<std::uint64_t>* join_step() noexcept { return nullptr; }
  /// Connects this rank with former and new ranks, as rank `rank` of a new group. Collective of all of them. `names`:
  /// numbers in messages. [rank] Only if join_step() is not null.
  virtual Ptr<Backend> connect_with_new(const Ptr<c10d::Store>& store, int rank, const std::vector<int>& names);
  /// Called when this backend replaces `former`, which was of the same group.
  virtual void follow(const Backend& /*former*/) noexcept {}
  /// Returns the device for tensors of ddpkit's own messages.
  virtual at::Device control_device() const { return at::kCPU; }
  /// Returns null if the ranks do not map common memory.
  virtual SymmetricMemory* symmetric_memory() noexcept { return nullptr; }
  /// Returns whether a reduce-scatter is an all-reduce of a copy of the input.
  virtual bool scatters_by_all_reduce() const noexcept { return false; }

  // c10d's calls, with tensors of any shape. Outputs, and the input of a reduce-scatter, are contiguous.
  WorkPtr start_all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op);
  WorkPtr start_broadcast(const at::Tensor& tensor, int root);
  WorkPtr start_all_gather(const at::Tensor& output, const at::Tensor& input);
  WorkPtr start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);
  // Start a collective and wait for it. The shm backend needs no c10d::Work here, which takes half of the time of a
  // small all-reduce.
  virtual void all_reduce_blocking(const at::Tensor& tensor, const c10d::ReduceOp& op);
  virtual void all_gather_blocking(const at::Tensor& output, const at::Tensor& input);
  virtual void reduce_scatter_blocking(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);
  virtual void broadcast_blocking(const at::Tensor& tensor, int root);
  virtual void barrier_blocking();
};

/// Time to wait for the guard, which knows the failed rank. The backend may fail before the guard.
inline constexpr std::chrono::milliseconds kPatience(500);

/// Forwards the calls to a backend of c10d, writes them to the ring of events, and throws the failures that a guard
/// reports.
class ForwardingBackend : public Backend {
 public:
  /// `guard`: null if the backend reports its failures only itself. `hides_aborts`: after an abort, the backend's
  /// collectives seem to have succeeded.
  ForwardingBackend(Ptr<c10d::Backend> inner, at::Device device, std::unique_ptr<GroupGuard> guard = nullptr,
                    bool hides_aborts = false);

  Ptr<c10d::Backend> native() override { return inner_; }
  void abort_group(const std::string& reason) noexcept override;
  void check() override;
  std::string end(std::chrono::milliseconds limit) override;
  Ptr<Backend> subgroup(const Ptr<c10d::Store>& store, const std::vector<int>& ranks,
                        const LaunchEnvironment& part) override;
  bool is_elastic() const noexcept override { return agreement_ != nullptr; }
  Remainder shrink(int min_ranks) override;
  int name() const noexcept override;
  std::atomic<std::uint64_t>* join_step() noexcept override;
  Ptr<Backend> connect_with_new(const Ptr<c10d::Store>& store, int rank, const std::vector<int>& names) override;
  void follow(const Backend& former) noexcept override;
  at::Device control_device() const override { return device_; }
  void leave() noexcept override;
  GroupGuard& guard() const { return *guard_; }

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  Ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return inner_->supportsTensorAlloc(device); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return inner_->allocateTensor(size, options);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    inner_->monitoredBarrier(options, wait_all_ranks);
  }

 protected:
  /// Returns a function that reports whether `work` has ended; called on the guard's thread. It must not own `work`,
  /// because `work` owns tensors. Returns an empty function during the capture of a CUDA graph: the call then runs in
  /// each replay.
  virtual std::function<bool()> end_of(const WorkPtr& /*work*/) { return {}; }
  /// Returns `work` of a collective, or a work whose wait() also ends after an abort.
  virtual WorkPtr ending(WorkPtr work) { return work; }
  /// For a backend with a guard and with reconnect(). `engine`: of the same ranks.
  void start_agreement(std::shared_ptr<shm::Engine> engine);
  /// Creates this backend again for the ranks that remain. Throws if they do not connect within a limit. `name`: this
  /// rank's number in messages. `check`: throws if another rank has ended.
  virtual Ptr<ForwardingBackend> reconnect(const Ptr<c10d::Store>& /*store*/, const LaunchEnvironment& /*place*/,
                                           int /*name*/, const std::function<void()>& /*check*/) {
    return nullptr;
  }
  /// Records a call of `bytes` bytes, if the group has several ranks. Returns it and its index in the ring of events.
  std::pair<Event, std::uint64_t> begin(EventKind kind, std::uint64_t bytes);

  const at::Device device_;
  const std::unique_ptr<GroupGuard> guard_;
  /// Shared while a call is being started. An abort that frees what `inner_` uses needs it exclusively.
  std::shared_timed_mutex starts_;

 private:
  class TracedWork;

  /// Connects the ranks of `engine`. Returns null if another rank is lost meanwhile.
  Ptr<ForwardingBackend> connect_again(const std::shared_ptr<shm::Engine>& engine);
  /// Calls `start` and records the call with the size of `tensor`. Checks the devices of `tensor` and `others`.
  template <class Start>
  WorkPtr trace(EventKind kind, const at::Tensor& tensor, const Tensors& others, const Start& start);
  void check_device(EventKind kind, const at::Tensor& tensor) const;

  const Ptr<c10d::Backend> inner_;
  const bool hides_aborts_, records_;
  const std::uint32_t group_number_;  ///< For the ring of events, as `sequence_`.
  std::atomic<std::uint64_t> sequence_ = 0;
  std::unique_ptr<Agreement> agreement_;  ///< Of an elastic group.
};

/// Creates a backend by its name in InitOptions. Collective. Throws InvalidArgument for an unknown name, and for a
/// backend that is not built.
c10::intrusive_ptr<Backend> create_backend(std::string_view name, const c10::intrusive_ptr<c10d::Store>& store,
                                           const LaunchEnvironment& environment, at::Device device,
                                           std::chrono::milliseconds timeout);
/// `name`: this rank's number in messages. -1: environment.rank. Throws InvalidArgument if the backend is not built.
c10::intrusive_ptr<ForwardingBackend> create_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                          const LaunchEnvironment& environment,
                                                          std::chrono::milliseconds timeout, int name = -1);
/// Throws InvalidArgument if the backend is not built, or cannot use `device` on this host.
void check_nccl(at::Device device);
c10::intrusive_ptr<ForwardingBackend> create_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                          const LaunchEnvironment& environment, at::Device device,
                                                          std::chrono::milliseconds timeout);

}  // namespace ddpkit
