// Tier 2: c10d's Backend.hpp.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/backend.h"

namespace ddpkit {

/// Runs calls in order on a separate thread.
class CallQueue {
 public:
  CallQueue();
  /// Waits for the queued calls.
  ~CallQueue();
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  void push(std::function<void()> call);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> calls_;
  bool ends_ = false;
  std::thread thread_;
};

/// Collectives of CPU ranks on several hosts, with equally many ranks per host: shared memory within a host, gloo
/// between hosts.
///
/// All-reduce has three steps: a reduce-scatter among the ranks of a host in shared memory, an all-reduce of each slice
/// among the ranks with the same local rank (a rail), and an all-gather in shared memory. So each byte crosses the
/// network once per host, not once per rank. Large tensors are split into pieces, and the three steps of different
/// pieces overlap. Broadcast, all-gather and barrier work alike. Other collectives use gloo among all ranks.
class HierarchicalBackend : public Backend {
 public:
  struct Groups {
    Ptr<Backend> in;              ///< shm among this host's ranks, for the step before the network.
    Ptr<Backend> out;             ///< shm among the same ranks, for the step after the network.
    Ptr<ForwardingBackend> rail;  ///< gloo among the ranks with this local rank on all hosts.
    Ptr<ForwardingBackend> all;   ///< gloo among all ranks.
    std::array<Backend*, 4> each() const { return {in.get(), out.get(), rail.get(), all.get()}; }
  };

  /// Rank r has local rank r % `local_world_size` on host r / `local_world_size`.
  HierarchicalBackend(int rank, int world_size, int local_world_size, Groups groups);
  /// Aborts queued collectives, because other ranks may never join them. Waits for a running network call.
  ~HierarchicalBackend() override;

  const std::string getBackendName() const override { return "hierarchical"; }
  Ptr<Options> getBackendOptions() override { return groups_.all->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override;
  uint64_t getSequenceNumberForGroup() override { return groups_.all->getSequenceNumberForGroup(); }
  void setSequenceNumberForGroup() override {}

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return groups_.all->reduce(tensors, options);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return groups_.all->allgather(outputs, inputs, options);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return groups_.all->gather(outputs, inputs, options);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return groups_.all->scatter(outputs, inputs, options);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return groups_.all->reduce_scatter(outputs, inputs, options);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return groups_.all->_reduce_scatter_base(output, input, options);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    return groups_.all->alltoall_base(output, input, output_splits, input_splits, options);
  }
  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    return groups_.all->send(tensors, destination, tag);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override { return groups_.all->recv(tensors, source, tag); }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override { return groups_.all->recvAnysource(tensors, tag); }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    groups_.all->monitoredBarrier(options, wait_all_ranks);
  }

  bool scatters_by_all_reduce() const noexcept override { return groups_.all->scatters_by_all_reduce(); }
  void abort_group(const std::string& reason) noexcept override;
  std::string end(std::chrono::milliseconds limit) override;
  void check() override {
    for (Backend* group : groups_.each()) group->check();
  }
  /// A subset may have different numbers of ranks per host, so its group uses gloo.
  Ptr<Backend> subgroup(const Ptr<c10d::Store>& store, const std::vector<int>& /*ranks*/,
                        const LaunchEnvironment& part) override {
    return create_gloo_backend(store, part, groups_.all->guard().timeout());
  }

 private:
  class Job;
  struct Piece;

  std::size_t hosts() const { return static_cast<std::size_t>(size_ / local_world_size_); }
  int local_rank() const { return rank_ % local_world_size_; }
  int host() const { return rank_ / local_world_size_; }
  /// Runs `call`. An exception aborts the group and ends one part of the job.
  template <class Call>
  void attempt(const Ptr<Job>& job, const Call& call);
  /// The steps of an all-reduce on the first queue and on the second queue.
  void reduce_piece(const std::shared_ptr<Piece>& piece);
  void gather_piece(const std::shared_ptr<Piece>& piece);
  /// Runs a whole collective on the first queue.
  WorkPtr enqueue(const Ptr<Job>& job, std::function<void()> call);

  int local_world_size_;
  Groups groups_;
  std::atomic<bool> ending_ = false;
  const std::shared_ptr<std::atomic<int>> unfinished_jobs_ = std::make_shared<std::atomic<int>>(0);
  CallQueue second_;  ///< Waits for the network and uses `out`.
  CallQueue first_;   ///< Uses `in` and starts the network calls. Destroyed first, because it pushes to second_.
};

/// Collective. Throws InvalidArgument on all ranks if hosts have different numbers of ranks, or if the ranks are not
/// numbered host by host.
c10::intrusive_ptr<Backend> create_hierarchical_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                        const LaunchEnvironment& environment,
                                                        std::chrono::milliseconds timeout);

}  // namespace ddpkit
