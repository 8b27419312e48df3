// Tier 2: c10d's Work.hpp.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

#include "comm/shm/engine.h"

namespace ddpkit {

/// c10d's handle on one or several of the engine's operations. Any thread may use it.
class ShmWork : public c10d::Work {
 public:
  /// Begins a profiler's event, whose end is the moment at which the work is seen to be complete.
  ShmWork(std::shared_ptr<shm::Engine> engine, c10d::OpType type, std::vector<at::Tensor> outputs,
          std::chrono::milliseconds timeout, at::TensorList inputs);
  /// A send that nobody has waited for goes on in the background.
  ~ShmWork() override;

  void reserve(std::size_t operations) { pending_.reserve(operations); }
  void add(shm::PendingHandle pending) { pending_.push_back(std::move(pending)); }

  bool isCompleted() override;
  bool isSuccess() const override { return !exception(); }
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void abort() override { engine_->abort("the program aborted a collective"); }
  /// Holds result(). Completed from a thread of the group's, also when nobody waits for the work itself.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  /// Keeps the exception under way, the first one.
  void fail();
  void end_event();

  std::shared_ptr<shm::Engine> engine_;
  std::vector<shm::PendingHandle> pending_;
  std::vector<at::Tensor> outputs_;
  std::chrono::milliseconds timeout_;
  const bool has_event_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  ///< Guarded, as exception_, by c10d::Work's mutex_.
};

}  // namespace ddpkit
