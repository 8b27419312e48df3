// Tier 2: c10d's Work.hpp. A backend with a guard.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "comm/backends.h"
#include "comm/guard.h"

namespace ddpkit {

/// Time to wait for the guard, which knows the failed rank. The backend may fail before the guard.
inline constexpr std::chrono::milliseconds kPatience(500);

class GuardedBackend : public AbortableBackend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// `hides_aborts`: after an abort, the backend's collectives seem to have succeeded.
  GuardedBackend(std::unique_ptr<GroupGuard> guard, bool hides_aborts)
      : guard_(std::move(guard)), hides_aborts_(hides_aborts) {}
  void abort_group(const std::string& reason) noexcept override { guard_->abort(reason); }
  GroupGuard& guard() const { return *guard_; }
  /// Wraps `work`, which `backend` (this object) has started. The result throws the group's failure, if there is one.
  WorkPtr guarded(WorkPtr work, const c10::intrusive_ptr<c10d::Backend>& backend, std::uint64_t record,
                  bool is_message) const;
  bool hides_aborts() const noexcept { return hides_aborts_; }

 protected:
  /// Returns a function that reports whether `work` has ended; called on another thread. It must not own `work`,
  /// because `work` owns tensors. Returns an empty function during the capture of a CUDA graph.
  virtual std::function<bool()> end_of(const WorkPtr& work) const = 0;

  std::unique_ptr<GroupGuard> guard_;

 private:
  bool hides_aborts_;
};

}  // namespace ddpkit
