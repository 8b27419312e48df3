#include "comm/backends/staged_work.h"

#include <utility>

namespace ddpkit {

StagedWork::StagedWork(int rank, c10d::OpType type, Collective collective, Tensors host)
    : c10d::Work(rank, type), collective_(std::move(collective)), host_(std::move(host)) {}

bool StagedWork::isCompleted() {
  const std::lock_guard lock(mutex_);
  return completed_ && (exception_ || done_->query());
}

}  // namespace ddpkit
