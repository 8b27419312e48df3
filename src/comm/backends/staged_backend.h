// Tier 2: c10d's Backend.hpp.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "comm/backend.h"
#include "comm/backends/staged_work.h"
#include "comm/backends/staging.h"

namespace ddpkit {

/// Runs collectives of a device's tensors on a host backend. Each collective is queued: wait for the caller's stream,
/// copy to the host, run the collective, copy back. wait() makes the caller's stream wait. So the host runs ahead, as
/// with NCCL, and a later call throws the errors.
///
/// CPU tensors use a separate group without the queue. Queued collectives run in the queue's order, which is the same
/// on all ranks. There is no order between queued collectives and those of CPU tensors.
class StagedBackend : public Backend {
 public:
  /// `host` and `staged` are two groups of the same ranks.
  StagedBackend(Ptr<Backend> host, Ptr<Backend> staged, std::unique_ptr<StagingQueue> queue, at::Device device);
  /// Does not wait for queued collectives.
  ~StagedBackend() override;

  const std::string getBackendName() const override { return host_->getBackendName(); }
  Ptr<Options> getBackendOptions() override { return host_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override;
  uint64_t getSequenceNumberForGroup() override { return host_->getSequenceNumberForGroup(); }
  void setSequenceNumberForGroup() override {}

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
  /// Only for CPU tensors: in the queue, a message would wait for an earlier message that waits for its answer.
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  /// A barrier of the hosts. Does not wait for queued collectives.
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return host_->barrier(options); }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    host_->monitoredBarrier(options, wait_all_ranks);
  }

  void abort_group(const std::string& reason) noexcept override;
  void check() override;
  std::string end(std::chrono::milliseconds limit) override;
  Ptr<Backend> subgroup(const Ptr<c10d::Store>& store, const std::vector<int>& ranks,
                        const LaunchEnvironment& part) override;

 private:
  /// A tensor of a collective, and the directions in which it is copied.
  struct Part {
    at::Tensor tensor;
    bool in = false, out = false;
  };
  /// Returns the inputs, then the outputs.
  static std::vector<Part> parts_of(const Tensors& inputs, const Tensors& outputs);
  struct Job;
  /// Runs the collective on the host copies of the parts. [part]
  using Collective = std::function<WorkPtr(c10d::Backend& backend, Tensors& host)>;

  WorkPtr stage(const char* call, c10d::OpType type, std::vector<Part> parts, Collective collective);
  /// Returns whether the tensors must be staged. Throws InvalidArgument for a mix of host and device tensors.
  bool staged(const char* call, std::initializer_list<const Tensors*> lists) const;
  void refuse_message(const char* call, const Tensors& tensors) const;
  void release_finished();

  Ptr<Backend> host_, staged_;
  std::unique_ptr<StagingQueue> queue_;
  at::Device device_;
  std::shared_ptr<StagedFailure> failure_ = std::make_shared<StagedFailure>();
  std::deque<std::unique_ptr<Job>> jobs_;  ///< Queued or completed.
};

/// Creates two groups of the shm backend and a stream of `device`. Collective, like create_shm_backend().
c10::intrusive_ptr<Backend> create_staged_shm_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                      int world_size, at::Device device,
                                                      std::chrono::milliseconds timeout);

}  // namespace ddpkit
