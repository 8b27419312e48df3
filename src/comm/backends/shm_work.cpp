#include "comm/backends/shm_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <atomic>

namespace ddpkit {

namespace {

using c10d::OpType;

/// Returns the name of a profiler event, as in ProcessGroupGloo; null without a profiler.
const char* event_title(OpType type) {
  if (!at::hasCallbacks()) return nullptr;
  switch (type) {
    case OpType::ALLREDUCE:
    case OpType::ALLREDUCE_COALESCED:
      return "shm:all_reduce";
    case OpType::_ALLREDUCE_SPARSE:
      return "shm:sparse_all_reduce";
    case OpType::ALLGATHER:
    case OpType::_ALLGATHER_BASE:
    case OpType::ALLGATHER_COALESCED:
      return "shm:all_gather";
    case OpType::REDUCE_SCATTER:
    case OpType::_REDUCE_SCATTER_BASE:
      return "shm:reduce_scatter";
    case OpType::ALLTOALL:
    case OpType::ALLTOALL_BASE:
      return "shm:all_to_all";
    case OpType::BROADCAST:
      return "shm:broadcast";
    case OpType::REDUCE:
      return "shm:reduce";
    case OpType::GATHER:
      return "shm:gather";
    case OpType::SCATTER:
      return "shm:scatter";
    case OpType::SEND:
      return "shm:send";
    case OpType::RECV:
      return "shm:recv";
    case OpType::RECVANYSOURCE:
      return "shm:recvAnySource";
    case OpType::BARRIER:
      return "shm:barrier";
    default:
      return "shm:coalesced";
  }
}

std::optional<std::vector<at::Tensor>> event_inputs(at::TensorList inputs) {
  return at::hasCallbacks() ? std::optional(inputs.vec()) : std::nullopt;
}

}  // namespace

ShmWork::ShmWork(std::shared_ptr<shm::Engine> engine, OpType type, std::vector<at::Tensor> outputs,
                 std::chrono::milliseconds timeout, at::TensorList inputs)
    : c10d::Work(engine->rank(), type, event_title(type), event_inputs(inputs)),
      engine_(std::move(engine)),
      outputs_(std::move(outputs)),
      timeout_(timeout),
      has_event_(static_cast<bool>(recordFunctionEndCallback_)) {}

ShmWork::~ShmWork() {
  end_event();
  if (has_ended_ || opType_ != OpType::SEND || exception_ || pending_.empty() || !engine_->is_of_this_process()) return;
  try {
    if (!engine_->test(pending_[0])) engine_->finish_in_background(pending_[0]);
  } catch (...) {
    // The group has failed; its next call throws the error.
  }
}

std::exception_ptr ShmWork::exception() const {
  const std::lock_guard lock(mutex_);
  return exception_;
}

void ShmWork::fail() {
  {
    const std::lock_guard lock(mutex_);
    if (!exception_) exception_ = std::current_exception();
  }
  end_event();
}

void ShmWork::end_event() {
  if (!has_event_) return;
  std::function<void()> end;
  {
    const std::lock_guard lock(mutex_);
    end.swap(recordFunctionEndCallback_);
  }
  if (end) end();
}

bool ShmWork::isCompleted() {
  if (exception()) return true;
  try {
    for (const auto& pending : pending_) {
      if (!engine_->test(pending)) return false;
    }
    has_ended_ = true;
    end_event();
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
  has_ended_ = true;
  end_event();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  }
  // Completes when the last of several operations completes, or with the first failure.
  if (pending_.empty()) future_->markCompleted(c10::IValue(outputs_));  // The list of tensors was empty.
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
