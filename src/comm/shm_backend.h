// Tier 2: c10d's Backend.hpp.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>

#include "comm/backends.h"
#include "comm/shm/engine.h"

namespace ddpkit {

/// c10d's contract on top of shm::Engine: checks tensors, makes them dense, hands out Work.
class ShmBackend : public c10d::Backend, public SymmetricMemory {
 public:
  ShmBackend(std::shared_ptr<shm::Engine> engine);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  void setTimeout(std::chrono::milliseconds timeout) override { engine_->set_timeout(timeout); }
  uint64_t getSequenceNumberForGroup() override { return engine_->sequence(); }
  void setSequenceNumberForGroup() override {}

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) override;
  void abort_group(const std::string& reason) noexcept override { engine_->abort(reason); }
  void abort() override { engine_->abort("the program called abort()"); }

 private:
  std::shared_ptr<shm::Engine> engine_;
};

}  // namespace ddpkit
