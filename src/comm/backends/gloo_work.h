// Tier 2: c10d's Work.hpp.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <utility>
#include <vector>

#include <ddpkit/error.h>

#include "comm/timeout.h"

namespace ddpkit {

/// A collective whose wait() also ends when gloo's threads are stuck.
class GlooWork final : public c10d::Work {
 public:
  /// `is_stuck`: called every 200 ms of a wait; it owns the group.
  GlooWork(c10::intrusive_ptr<c10d::Work> work, int rank, std::function<bool()> is_stuck)
      : c10d::Work(rank, work->retrieveOpType()), work_(std::move(work)), is_stuck_(std::move(is_stuck)) {}

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work_->getFuture(); }

  bool wait(std::chrono::milliseconds timeout) override {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::milliseconds kSlice(200);
    const auto deadline = Clock::now() + (timeout == kNoTimeout ? clamp_timeout(timeout.max()) : timeout);
    while (!work_->isCompleted() && Clock::now() < deadline) {
      try {
        return work_->wait(std::min(kSlice, time_until(deadline)));
      } catch (const std::exception&) {
        // The slice has ended, and the work may have ended since; or it has failed. The last wait() throws its error.
      }
      if (is_stuck_()) throw Error("a connection of gloo has ended");
    }
    return work_->wait(timeout == kNoTimeout ? timeout : std::chrono::milliseconds(1));
  }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
  const std::function<bool()> is_stuck_;
};

}  // namespace ddpkit
