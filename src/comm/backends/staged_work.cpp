#include "comm/backends/staged_work.h"

#include <exception>
#include <mutex>
#include <utility>

namespace ddpkit {

StagedWork::StagedWork(int rank, c10d::OpType type, Collective collective, Tensors host)
    : c10d::Work(rank, type), collective_(std::move(collective)), host_(std::move(host)) {}

bool StagedWork::isCompleted() {
  const std::lock_guard lock(mutex_);
  return completed_ && (exception_ || done_->query());
}

bool StagedWork::wait(std::chrono::milliseconds) {
  std::unique_lock lock(mutex_);
  cv_.wait(lock, [this] { return completed_; });
  if (exception_) std::rethrow_exception(exception_);
  done_->block_current_stream();
  return true;
}

}  // namespace ddpkit
