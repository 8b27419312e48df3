// Tier 2: c10d's Backend.hpp.
#pragma once

#include <memory>

#include "comm/backend.h"
#include "comm/backends/shm_requests.h"
#include "comm/shm/engine.h"
#include "comm/symmetric_memory.h"

namespace ddpkit {

/// The calls of c10d, and symmetric memory, on shm::Engine.
class ShmBackend : public Backend, public SymmetricMemory {
 public:
  ShmBackend(std::shared_ptr<shm::Engine> engine, std::chrono::milliseconds timeout);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  Ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  uint64_t getSequenceNumberForGroup() override { return engine_->sequence(); }
  void setSequenceNumberForGroup() override {}

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return allreduce(tensors, options);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  bool supportsSplitting() const override { return true; }
  /// Creates a group of the ranks in `ranks` (rank numbers of this group), in that order. Returns null on other ranks.
  Ptr<c10d::Backend> split(const Ptr<c10d::Store>& store, const std::vector<int>& ranks,
                           const Ptr<Options>& options) override;

  void set_elastic(const Ptr<c10d::Store>& /*store*/, const LaunchEnvironment& /*environment*/) override {
    engine_->set_elastic();
  }
  bool is_elastic() const noexcept override { return engine_->is_elastic(); }
  Remainder shrink(int min_ranks) override;
  int name() const noexcept override;
  std::atomic<std::uint64_t>* join_step() noexcept override;
  Ptr<Backend> connect_with_new(const Ptr<c10d::Store>& store, int rank, const std::vector<int>& names) override;
  void follow(const Backend& former) noexcept override;

  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  /// Collective. Returns symmetric memory.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  void abort_group(const std::string& reason) noexcept override { engine_->abort(reason); }
  void check() override {
    if (!is_elastic()) engine_->check();
  }
  std::string end(std::chrono::milliseconds limit) override { return engine_->end(limit, kShutDown); }
  Ptr<Backend> subgroup(const Ptr<c10d::Store>& store, const std::vector<int>& ranks,
                        const LaunchEnvironment& part) override;
  SymmetricMemory* symmetric_memory() noexcept override { return this; }
  void all_reduce_blocking(const at::Tensor& tensor, const c10d::ReduceOp& op) override;
  void all_gather_blocking(const at::Tensor& output, const at::Tensor& input) override;
  void reduce_scatter_blocking(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) override;
  void broadcast_blocking(const at::Tensor& tensor, int root) override;
  void barrier_blocking() override;

  WorkPtr all_reduce_coalesced(const Tensors& tensors, const c10d::ReduceOp& op) override;
  WorkPtr reduce_scatter_coalesced(const Tensors& tensors, const at::Tensor& shard, const c10d::ReduceOp& op) override;
  std::shared_ptr<ScopedArena> open_arena(std::size_t capacity, std::size_t reserve) override;
  std::shared_ptr<shm::SymmetricSegment> allocate_segment(std::size_t bytes) override;

 private:
  /// Starts requests. Callers make all requests of a call first, so an invalid one leaves the others unstarted.
  /// `inputs` are for the profiler.
  WorkPtr start(std::vector<shm::CollectiveArgs> requests, c10d::OpType type, Tensors outputs,
                std::chrono::milliseconds timeout, at::TensorList inputs) const;
  WorkPtr start(shm::CollectiveArgs request, c10d::OpType type, Tensors outputs, std::chrono::milliseconds timeout,
                at::TensorList inputs) const;
  WorkPtr start(shm::MessageHandle message, c10d::OpType type, const at::Tensor& tensor) const;

  std::shared_ptr<shm::Engine> engine_;
  const ShmRequests requests_;
  std::chrono::milliseconds timeout_;
  std::weak_ptr<ScopedArena> arena_;
  std::shared_ptr<ScopedArena> former_arena_;  ///< Of the group before the change, until open_arena().
};

/// create_shm_backend() for a part of a larger group. Errors count ranks from `first_rank`.
c10::intrusive_ptr<Backend> create_shm_part(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                            std::chrono::milliseconds timeout, int first_rank = 0);

}  // namespace ddpkit
