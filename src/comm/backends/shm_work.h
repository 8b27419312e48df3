// Tier 2: c10d's Work.hpp.
#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <memory>
#include <vector>

#include "comm/shm/engine.h"

namespace ddpkit {

/// c10d::Work for one or several operations of the engine. Thread-safe.
class ShmWork : public c10d::Work {
 public:
  /// Starts a profiler event, which ends when the work is seen to be complete.
  ShmWork(std::shared_ptr<shm::Engine> engine, c10d::OpType type, std::vector<at::Tensor> outputs,
          std::chrono::milliseconds timeout, at::TensorList inputs);
  /// A send that was not waited for continues in the background.
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
  /// Returns a future of result(). A thread of the group completes it, also if wait() is not called.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  /// Stores the current exception if it is the first.
  void fail();
  void end_event();

  std::shared_ptr<shm::Engine> engine_;
  c10::SmallVector<shm::PendingHandle, 1> pending_;
  std::vector<at::Tensor> outputs_;
  std::chrono::milliseconds timeout_;
  const bool has_event_;
  std::atomic<bool> has_ended_ = false;             ///< All operations have completed.
  c10::intrusive_ptr<c10::ivalue::Future> future_;  ///< Guarded by c10d::Work's mutex_, like exception_.
};

}  // namespace ddpkit
