#include "parallel/ddp/reducer_impl.h"

#include <fmt/format.h>

#include "parallel/model_agreement.h"

namespace ddpkit {

/// Before a gradient counts, or when backward reaches an output of a forward that may use no parameter.
void Reducer::Impl::enter_backward() {
  end_abandoned_backward();
  if (!in_backward_) begin_backward();
  tracker_->enter();
}

/// Ends a backward that has begun and will not end. What a backward itself calls is part of a backward that continues,
/// such as the forward pass of a checkpoint.
void Reducer::Impl::end_abandoned_backward() {
  const bool has_died = in_backward_ && !shadows_ && !tracker_->will_end();
  if (!in_backward_ || (!has_died && BackwardTracker::inside_backward())) return;
  // The other ranks may still write into what has been passed to them.
  for (Bucket& bucket : buckets_) {
    if (bucket.work.valid()) bucket.work.wait();
  }
  forget_backward();
}

void Reducer::Impl::end_backward() {
  if (!in_backward_) return;
  try {
    if (tracker_->continues_outside()) return;
    finish_backward();
  } catch (...) {
    give_up("at its end");
    rethrow_with_advice();
  }
}

/// At an output of a forward that uses no parameter, as far as its graph shows: the other ranks wait for this one.
void Reducer::Impl::enter_at_output() {
  if (!synchronize || !hooks_->may_run()) return;
  enter_backward();
  tracker_->note_output_reached();
}

/// In a catch block: tells the other ranks, which would wait for this one in a later bucket or collective. Where the
/// error came from them, the group has ended already, and nothing changes.
void Reducer::Impl::give_up(const std::string& where) noexcept {
  forget_backward();
  try {
    try {
      throw;
    } catch (const std::exception& error) {
      group_.abort(fmt::format("backward on rank {} failed {}: {}", group_.rank(), where, error.what()));
    }
  } catch (...) {
    group_.abort("backward failed");
  }
}

void Reducer::Impl::leave_backward() noexcept {
  in_backward_ = in_hook_ = false;
  used_.reset();
  tracker_->reset();
}

void Reducer::Impl::forget_backward() noexcept {
  leave_backward();
  reached_output_ = {};
  memory_->forget();
  arrivals_.clear();  // Half an order, which the next backward begins anew.
  for (Bucket& bucket : buckets_) {
    bucket.work = {};
    bucket.finish = nullptr;
  }
}

}  // namespace ddpkit
