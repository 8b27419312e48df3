#include "comm/backends/guarded_backend.h"

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace ddpkit {
namespace {

class GuardedWork final : public c10d::Work {
 public:
  GuardedWork(c10::intrusive_ptr<c10d::Work> work, c10::intrusive_ptr<c10d::Backend> backend,
              const GuardedBackend& guarded)
      : c10d::Work(backend->getRank(), work->retrieveOpType()),
        work_(std::move(work)),
        backend_(std::move(backend)),
        guarded_(guarded) {}

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override {
    return work_->isSuccess() && !(guarded_.hides_aborts() && guarded_.guard().failed());
  }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work_->getFuture(); }

  bool wait(std::chrono::milliseconds timeout) override {
    bool result = false;
    try {
      result = work_->wait(timeout);
    } catch (const std::exception&) {
      guarded_.guard().throw_failure(kPatience);
      throw;
    }
    if (guarded_.hides_aborts()) guarded_.guard().throw_failure();
    return result;
  }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
  const c10::intrusive_ptr<c10d::Backend> backend_;  ///< Owns guarded_.
  const GuardedBackend& guarded_;
};

}  // namespace

GuardedBackend::WorkPtr GuardedBackend::guarded(WorkPtr work, const c10::intrusive_ptr<c10d::Backend>& backend,
                                                std::uint64_t record, bool is_message) const {
  if (auto has_ended = end_of(work)) guard_->watch(record, is_message, std::move(has_ended));
  return c10::make_intrusive<GuardedWork>(std::move(work), backend, *this);
}

}  // namespace ddpkit
