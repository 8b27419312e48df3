#include <unordered_set>

#include "parallel/ddp/reducer_impl.h"

#include "parallel/ddp/reducer_events.h"
#include "parallel/join_session.h"

namespace ddpkit {

void Reducer::Impl::set_join(JoinSession* session, int index) {
  const std::lock_guard lock(mutex_);
  join_ = session;
  join_index_ = index;
  shadows_ = false;
  if (session) follow_sink();
}

void Reducer::Impl::announce(int event) {
  if (join_ && !shadows_) join_->announce(join_index_, event);
}

/// What an average over all ranks is multiplied by to be one over those that still have inputs.
double Reducer::Impl::join_factor() const {
  if (!join_ || join_->options().divide_by_initial_world_size) return 1;
  return static_cast<double>(group_.world_size()) / join_->active();
}

void Reducer::Impl::divide_by_active_ranks() {
  const double factor = join_factor();
  if (factor == 1 || memory_->sharded()) return;
  const at::NoGradGuard no_grad;
  std::unordered_set<const void*> divided;  // A program may give two parameters one gradient.
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
    if (!gradient.defined() || !used_.used_anywhere(i)) continue;
    if (divided.insert(gradient.unsafeGetTensorImpl()).second) gradient.mul_(factor);
  }
}

void Reducer::Impl::shadow_bucket() {
  const std::lock_guard lock(mutex_);
  begin_shadow();
  launch(next_bucket_++);
}

void Reducer::Impl::shadow_end_of_backward() {
  const std::lock_guard lock(mutex_);
  begin_shadow();
  finish_backward();
}

/// A backward without gradients.
void Reducer::Impl::begin_shadow() {
  shadows_ = true;
  if (in_backward_) return;
  in_backward_ = true;
  next_bucket_ = next_finished_ = next_taken_ = 0;
  for (Bucket& bucket : buckets_) bucket.timing.ready = {};
  for (NamedParameter& parameter : parameters_) parameter.tensor.mutable_grad().reset();
  used_.begin_shadow();
  first_gradient_ = last_gradient_ = Clock::now();
}

}  // namespace ddpkit
