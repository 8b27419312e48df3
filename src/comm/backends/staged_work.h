// Tier 2: c10d's Work.hpp.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/backends/staging.h"

namespace ddpkit {

/// The first error of a group's staged collectives. After an error, the later ones do nothing.
class StagedFailure {
 public:
  void set(std::exception_ptr failure);
  std::exception_ptr get() const;
  void rethrow() const;

 private:
  mutable std::mutex mutex_;
  std::exception_ptr failure_;
};

/// c10d::Work for a staged collective.
class StagedWork : public c10d::Work {
 public:
  StagedWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<StagingQueue::Mark> done,
             std::shared_ptr<const StagedFailure> failure);

  bool isCompleted() override { return failure_->get() || done_->query(); }
  bool isSuccess() const override { return !failure_->get(); }
  std::exception_ptr exception() const override { return failure_->get(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  /// Makes the current stream wait; the host does not wait. Ignores `timeout`: the group's timeout applies.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }

 private:
  std::vector<at::Tensor> outputs_;
  std::shared_ptr<StagingQueue::Mark> done_;
  std::shared_ptr<const StagedFailure> failure_;
};

}  // namespace ddpkit
