#include "comm/shm_work.h"

#include <ATen/core/ivalue.h>

#include <atomic>

namespace ddpkit {

ShmWork::ShmWork(std::shared_ptr<shm::Engine> engine, std::vector<shm::PendingHandle> pending, c10d::OpType type,
                 std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout)
    : c10d::Work(engine->rank(), type),
      engine_(std::move(engine)),
      pending_(std::move(pending)),
      outputs_(std::move(outputs)),
      timeout_(timeout) {}

ShmWork::~ShmWork() {
  if (opType_ != c10d::OpType::SEND || exception_) return;
  try {
    if (!engine_->test(pending_[0])) engine_->finish_in_background(pending_[0]);
  } catch (...) {
    // The group has ended; whoever uses it next is told.
  }
}

std::exception_ptr ShmWork::exception() const {
  const std::lock_guard lock(mutex_);
  return exception_;
}

void ShmWork::fail() {
  const std::lock_guard lock(mutex_);
  if (!exception_) exception_ = std::current_exception();
}

bool ShmWork::isCompleted() {
  if (exception()) return true;
  try {
    for (const auto& pending : pending_) {
      if (!engine_->test(pending)) return false;
    }
  } catch (...) {
    fail();
  }
  return true;
}

int ShmWork::sourceRank() const { return !pending_.empty() && pending_[0]->message ? pending_[0]->message->peer : -1; }

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (const auto failure = exception()) std::rethrow_exception(failure);
  try {
    for (const auto& pending : pending_) engine_->wait(pending, timeout == kNoTimeout ? timeout_ : timeout);
  } catch (...) {
    fail();
    throw;
  }
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  }
  // Complete with the last of several operations; with the first failure.
  if (pending_.empty()) future_->markCompleted(c10::IValue(outputs_));  // An empty list.
  auto left = std::make_shared<std::atomic<std::size_t>>(pending_.size());
  for (const auto& pending : pending_) {
    engine_->finish_in_background(pending, [future = future_, left, outputs = outputs_](std::exception_ptr failure) {
      if (failure) return future->setErrorIfNeeded(failure);
      if (left->fetch_sub(1) == 1) future->markCompleted(c10::IValue(outputs));
    });
  }
  return future_;
}

}  // namespace ddpkit
