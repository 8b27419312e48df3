// Tier 2: c10d's Backend.hpp.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/backend.h"
#include "comm/backends/staged_work.h"
#include "comm/backends/staging.h"

namespace ddpkit {

/// Runs collectives of a device's tensors on a host backend. A thread of the group copies to the host after the
/// work of the caller's stream, runs the collective and copies back, one collective after the other. Work::wait() and
/// later calls throw its errors; then the outputs keep their old values.
///
/// No function of the host runs within a stream: CUDA may run such functions of independent streams one after the
/// other, and while one blocks, calls that allocate may block too.
///
/// CPU tensors use a separate group without the thread. Queued collectives run in the queue's order, which is the same
/// on all ranks. There is no order between queued collectives and those of CPU tensors.
class StagedBackend : public Backend {
 public:
  /// `host` and `staged` are two groups of the same ranks.
  StagedBackend(Ptr<Backend> host, Ptr<Backend> staged, std::unique_ptr<StagingQueue> queue, at::Device device);
  /// Waits for queued collectives, at most for their timeouts.
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
  /// Starts the collective on the host copies of the parts. [part]
  using Collective = std::function<WorkPtr(c10d::Backend& backend, Tensors& host)>;

  WorkPtr stage(const char* call, c10d::OpType type, std::vector<Part> parts, Collective collective);
  /// Returns whether the tensors must be staged. Throws InvalidArgument for a mix of host and device tensors.
  bool staged(const char* call, std::initializer_list<const Tensors*> lists) const;
  void refuse_message(const char* call, const Tensors& tensors) const;
  void rethrow_failure();
  void fail(const std::exception_ptr& failure, const std::string& reason);
  void run();
  void run(StagedWork& work);

  Ptr<Backend> host_, staged_;
  std::unique_ptr<StagingQueue> queue_;
  at::Device device_;
  Ptr<StagedWork> last_;  ///< The latest one; all earlier ones have completed if it has.
  std::mutex mutex_;      ///< Guards the following members.
  std::condition_variable changed_;
  std::deque<Ptr<StagedWork>> queued_;
  std::exception_ptr failure_;  ///< The first one. After it, no collective runs.
  bool ends_ = false;
  std::thread thread_;  ///< The last member: it uses the others.
};

/// Creates two groups of the shm backend and a stream of `device`. Collective, like create_shm_backend().
c10::intrusive_ptr<Backend> create_staged_shm_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                      int world_size, at::Device device,
                                                      std::chrono::milliseconds timeout);

}  // namespace ddpkit
