#include "comm/backends/staged_work.h"

#include <utility>

namespace ddpkit {

void StagedFailure::set(std::exception_ptr failure) {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::move(failure);
}

std::exception_ptr StagedFailure::get() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void StagedFailure::rethrow() const {
  if (const auto failure = get()) std::rethrow_exception(failure);
}

StagedWork::StagedWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs,
                       std::shared_ptr<StagingQueue::Mark> done, std::shared_ptr<const StagedFailure> failure)
    : c10d::Work(rank, type), outputs_(std::move(outputs)), done_(std::move(done)), failure_(std::move(failure)) {}

bool StagedWork::wait(std::chrono::milliseconds) {
  failure_->rethrow();
  // Kernels that read the result must follow the copy to the device.
  done_->block_current_stream();
  return true;
}

}  // namespace ddpkit
