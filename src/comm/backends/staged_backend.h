// Tier 2: c10d's Backend.hpp.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "comm/backends.h"
#include "comm/backends/staged_work.h"
#include "comm/backends/staging.h"

namespace ddpkit {

/// Collectives of a device's tensors by a backend for the host's. Each is queued as: wait for the caller's stream, copy
/// to the host, the collective, copy back; waiting for it makes the caller's stream wait. So the host runs ahead, as
/// with NCCL, and what goes wrong comes out of a later call.
///
/// Tensors of the host go to a group of their own at once: what is queued comes when the device gets there, in the
/// queue's order, which is the same on all ranks, but between the two there is none.
class StagedBackend : public c10d::Backend, public AbortableBackend {
 public:
  template <class T>
  using Ptr = c10::intrusive_ptr<T>;
  using WorkPtr = Ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  /// `host` and `staged` are groups of the same ranks.
  StagedBackend(Ptr<c10d::Backend> host, Ptr<c10d::Backend> staged, std::unique_ptr<StagingQueue> queue);
  /// Does not wait for what is queued.
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
  /// Of the host's tensors only: queued behind each other, a message could not overtake one that waits for its answer.
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  /// Of the hosts: what is queued is not waited for.
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return host_->barrier(options); }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    host_->monitoredBarrier(options, wait_all_ranks);
  }

  void abort_group(const std::string& reason) noexcept override;
  void abort() override { abort_group("the program called abort()"); }

 private:
  /// A tensor that takes part, and which way it is copied.
  struct Part {
    at::Tensor tensor;
    bool in = false, out = false;
  };
  /// Inputs first.
  static std::vector<Part> parts_of(const Tensors& inputs, const Tensors& outputs);
  struct Job;
  /// Does the collective on the host's copies of the parts. [part]
  using Collective = std::function<WorkPtr(c10d::Backend& backend, Tensors& host)>;

  WorkPtr stage(const char* call, c10d::OpType type, std::vector<Part> parts, Collective collective);
  /// Whether the tensors are to be staged; throws InvalidArgument where some are and some are not.
  bool staged(const char* call, std::initializer_list<const Tensors*> lists) const;
  void refuse_message(const char* call, const Tensors& tensors) const;
  void release_finished();

  Ptr<c10d::Backend> host_, staged_;
  std::unique_ptr<StagingQueue> queue_;
  std::shared_ptr<StagedFailure> failure_ = std::make_shared<StagedFailure>();
  std::deque<std::unique_ptr<Job>> jobs_;  ///< Queued, and perhaps done.
};

/// Two groups of the shm backend, and a stream of `device`. Collective, as create_shm_backend().
c10::intrusive_ptr<c10d::Backend> create_staged_shm_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                            int world_size, at::Device device,
                                                            std::chrono::milliseconds timeout);

}  // namespace ddpkit
