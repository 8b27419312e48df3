#include <ddpkit/parallel/join.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include <ddpkit/error.h>

#include "parallel/join.h"

namespace ddpkit {
namespace {

constexpr int kPlain = -1;

/// Contexts by the backend of their group.
class Contexts {
 public:
  static Contexts& all() {
    static Contexts contexts;
    return contexts;
  }
  void set(const void* backend, JoinContext* context) {
    const std::lock_guard lock(mutex_);
    if (context) {
      contexts_[backend] = context;
    } else {
      contexts_.erase(backend);
    }
    any_ = !contexts_.empty();
  }
  JoinContext* find(const void* backend) {
    if (!any_) return nullptr;
    const std::lock_guard lock(mutex_);
    const auto found = contexts_.find(backend);
    return found == contexts_.end() ? nullptr : found->second;
  }

 private:
  std::mutex mutex_;
  std::map<const void*, JoinContext*> contexts_;
  std::atomic<bool> any_{false};
};

}  // namespace

/// All ranks with inputs send the same message, so the sum divided by their number is this message.
struct JoinContext::Message {
  std::int64_t index = 0;
  std::int64_t event = 0;
  std::int64_t numel = 0;
  std::int64_t dtype = 0;
};

JoinContext::JoinContext(ProcessGroup group, std::vector<Joinable*> joinables, const JoinOptions& options)
    : group_(std::move(group)), joinables_(std::move(joinables)), options_(options) {
  Contexts::all().set(group_.backend().get(), this);
  try {
    for (Joinable* joinable : joinables_) joinable->join_begin();
  } catch (...) {
    Contexts::all().set(group_.backend().get(), nullptr);
    throw;
  }
}

JoinContext::~JoinContext() { Contexts::all().set(group_.backend().get(), nullptr); }

JoinContext* JoinContext::running(const ProcessGroup& group) {
  JoinContext* context = Contexts::all().find(group.backend().get());
  return context && context->in_loop_ ? context : nullptr;
}

JoinContext* JoinContext::of(const Joinable& joinable) {
  JoinContext* context = Contexts::all().find(joinable.join_group().backend().get());
  return context && context->index_of(joinable) < context->joinables_.size() ? context : nullptr;
}

std::size_t JoinContext::index_of(const Joinable& joinable) const {
  return static_cast<std::size_t>(std::ranges::find(joinables_, &joinable) - joinables_.begin());
}

void JoinContext::notify(const Joinable& joinable, int event) {
  start({.index = static_cast<std::int64_t>(index_of(joinable)), .event = event});
}

void JoinContext::notify(const ProcessGroup& group, Plain collective, const at::Tensor& tensor) {
  if (JoinContext* context = running(group))
    context->start({.index = kPlain,
                    .event = static_cast<std::int64_t>(collective),
                    .numel = tensor.numel(),
                    .dtype = static_cast<std::int64_t>(tensor.scalar_type())});
}

void JoinContext::start(const Message& message) {
  if (work_.valid()) work_.wait();
  const at::NoGradGuard no_grad;
  last_ = at::tensor({std::int64_t{1}, message.index, message.event, message.numel, message.dtype}, at::kLong)
              .to(group_.device());
  work_ = group_.all_reduce_async(last_);
  if (options_.throw_on_early_termination && active() < group_.world_size())
    throw Error(fmt::format("{} of {} ranks have run out of inputs (join with throw_on_early_termination)",
                            group_.world_size() - active(), group_.world_size()),
                {.rank = group_.rank(), .call = "join"});
}

int JoinContext::active() {
  if (work_.valid()) work_.wait();
  work_ = {};
  const auto active = last_.defined() ? static_cast<int>(last_[0].item<std::int64_t>()) : group_.world_size();
  group_.check();
  return active;
}

int JoinContext::first_active(bool this_rank_is) const {
  const at::NoGradGuard no_grad;
  const at::Tensor rank =
      at::full({1}, this_rank_is ? group_.rank() : group_.world_size(), at::TensorOptions(at::kLong))
          .to(group_.device());
  group_.all_reduce(rank, ReduceOp::kMin);
  return static_cast<int>(rank.item<std::int64_t>());
}

int JoinContext::shadow_the_others() {
  if (work_.valid()) work_.wait();
  work_ = {};
  in_loop_ = false;
  const at::NoGradGuard no_grad;
  bool last = true;
  for (;;) {
    const at::Tensor sum = at::zeros({5}, at::kLong).to(group_.device());
    group_.all_reduce(sum);
    const at::Tensor on_host = sum.cpu();
    group_.check();
    const auto* numbers = on_host.const_data_ptr<std::int64_t>();
    const std::int64_t active = numbers[0];
    if (active == 0) break;
    last = false;
    if (options_.throw_on_early_termination)
      throw Error(fmt::format("this rank has run out of inputs, {} of {} have not (join with "
                              "throw_on_early_termination)",
                              active, group_.world_size()),
                  {.rank = group_.rank(), .call = "join"});
    last_ = on_host;
    const Message message{numbers[1] / active, numbers[2] / active, numbers[3] / active, numbers[4] / active};
    if (message.index != kPlain) {
      joinables_.at(static_cast<std::size_t>(message.index))->join_shadow(static_cast<int>(message.event));
      continue;
    }
    const at::Tensor zeros = at::zeros(
        {message.numel}, at::TensorOptions(static_cast<at::ScalarType>(message.dtype)).device(group_.device()));
    if (static_cast<Plain>(message.event) == Plain::kAllGather) {
      group_.all_gather(zeros);
    } else {
      group_.all_reduce(zeros);
    }
  }
  // Selects the largest number of forward passes, then the lowest rank.
  const std::int64_t ranks = group_.world_size();
  const std::int64_t own = last ? (forwards_ + 1) * ranks - 1 - group_.rank() : -1;
  const at::Tensor most = at::full({1}, own, at::kLong).to(group_.device());
  group_.all_reduce(most, ReduceOp::kMax);
  return static_cast<int>(ranks - 1 - most.item<std::int64_t>() % ranks);
}

void JoinContext::end(int source) {
  Contexts::all().set(group_.backend().get(), nullptr);
  for (Joinable* joinable : joinables_) joinable->join_end(source);
}

void join(std::initializer_list<std::reference_wrapper<Joinable>> joinables, const std::function<void()>& loop,
          const JoinOptions& options) {
  std::vector<Joinable*> all;
  for (Joinable& joinable : joinables) all.push_back(&joinable);
  if (all.empty()) throw InvalidArgument("join needs something to join, such as a DistributedDataParallel");
  const ProcessGroup group = all[0]->join_group();
  for (const Joinable* joinable : all) {
    if (joinable->join_group().backend() != group.backend())
      throw InvalidArgument("join: all its objects must be on one process group");
  }
  if (group.world_size() == 1) return loop();
  if (JoinContext::running(group)) throw InvalidArgument("join: this group is in a join already");
  JoinContext context(group, all, options);
  try {
    loop();
    context.end(context.shadow_the_others());
  } catch (const std::exception& error) {
    context.end(-1);
    group.abort(fmt::format("its loop within join ended with an error: {}", error.what()));
    throw;
  } catch (...) {
    context.end(-1);
    group.abort("its loop within join ended with an exception");
    throw;
  }
}

void join(Joinable& joinable, const std::function<void()>& loop, const JoinOptions& options) {
  join({std::ref(joinable)}, loop, options);
}

}  // namespace ddpkit
