#include "parallel/ddp/reducer_impl.h"

#include <ATen/ATen.h>

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "parallel/ddp/debug.h"

namespace ddpkit {
namespace {

/// With a sink, buckets that are reduced in place are no larger than they must be: a collective costs a few
/// microseconds, and the smaller the buckets, the less memory is held by gradients under way.
constexpr std::size_t kSinkBucketBytes = std::size_t{1} << 20;

}  // namespace

std::vector<ParameterInfo> Reducer::Impl::infos() const {
  std::vector<ParameterInfo> infos;
  for (std::size_t i = 0; i < dense_; ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    infos.push_back(
        {.numel = static_cast<std::size_t>(tensor.numel()), .dtype = tensor.scalar_type(), .device = tensor.device()});
  }
  return infos;
}

/// Memory and buckets for the hook there is. Collective.
void Reducer::Impl::lay_out() {
  const std::vector<NamedParameter> dense(parameters_.begin(),
                                          parameters_.begin() + static_cast<std::ptrdiff_t>(dense_));
  memory_ = std::make_unique<GradientMemory>(dense, agree_on_strides(), group_,
                                             GradientMemory::Options{.as_bucket_view = options_.gradient_as_bucket_view,
                                                                     .flat = static_cast<bool>(comm_hook_),
                                                                     .arena = options_.arena,
                                                                     .arena_bytes = options_.arena_bytes});
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < dense_; ++i) order.push_back(i);
  make_plan(order);
  tell_plan("buckets");
}

/// For DDPKIT_DEBUG. The plan is the same on all ranks.
void Reducer::Impl::tell_plan(const std::string& what) const {
  if (debug_level() < DebugLevel::kInfo || group_.rank() != 0) return;
  debug_line(group_, fmt::format("{}: {} for {} dense parameters, {} sparse ones beside", what, plan.size(), dense_,
                                 parameters_.size() - dense_));
  for (std::size_t b = 0; b < plan.size(); ++b) {
    std::vector<std::string> names;
    for (const std::size_t index : plan[b]) names.push_back(parameters_[index].name);
    debug_line(group_, fmt::format("  bucket {}: {} bytes, {} parameters: {}", b, buckets_[b].bytes, names.size(),
                                   fmt::join(names, ", ")));
  }
}

/// `order`: all dense parameters; the last one's gradient comes first.
void Reducer::Impl::make_plan(const std::vector<std::size_t>& order) {
  const auto all = infos();
  std::vector<ParameterInfo> ordered;
  for (const std::size_t index : order) ordered.push_back(all[index]);
  const bool small = memory_->sharded() && !memory_->flat();
  const auto cap = [small](std::size_t bytes) { return small ? std::min(bytes, kSinkBucketBytes) : bytes; };
  plan = plan_buckets(ordered, cap(options_.first_bucket_bytes), cap(options_.bucket_bytes));
  buckets_.clear();
  for (auto& members : plan) {
    Bucket& bucket = buckets_.emplace_back(group_.device());
    for (std::size_t& index : members) {
      index = order[index];
      bucket.bytes += all[index].bytes();
      bucket_of_[index] = buckets_.size() - 1;
    }
    bucket.timing.bytes = bucket.bytes;
    bucket.timing.parameters = members.size();
  }
  memory_->keep_alive_for(seen_);  // Copies out of the old buckets may still be queued.
  seen_.clear();
  memory_->lay_out(plan);
  seen_.add_current();
  last_readers_.add_current();  // It has zeroed them.
}

void Reducer::Impl::note_arrival(std::size_t index) {
  if (rebuilds != 0 || index >= dense_) return;
  if (used_.arrivals(index) > 1) std::erase(arrivals_, index);  // Its bucket waits for the last one.
  if (arrivals_.size() < dense_) arrivals_.push_back(index);
}

/// Once, after the first backward: buckets in the order in which gradients really come, which is not always the reverse
/// of the order in which the parameters were registered. As in Python not where each backward may use others.
void Reducer::Impl::rebuild() {
  if (rebuilds != 0 || used_.policy() == UnusedPolicy::kFind) return;
  ++rebuilds;
  std::vector<std::int64_t> order;  // Rank 0's counts: the plan must be the same everywhere.
  std::vector<bool> seen(dense_, false);
  for (const std::size_t index : arrivals_) {
    order.push_back(static_cast<std::int64_t>(index));
    seen[index] = true;
  }
  for (std::size_t i = dense_; i-- > 0;) {
    if (!seen[i]) order.push_back(static_cast<std::int64_t>(i));
  }
  arrivals_.clear();
  const at::Tensor agreed = at::tensor(order, at::kLong).to(group_.device());
  if (group_.world_size() > 1) group_.broadcast(agreed);
  const at::Tensor on_host = agreed.cpu();
  std::vector<std::size_t> first_comes_last;
  seen.assign(dense_, false);
  for (std::int64_t i = on_host.numel(); i-- > 0;) {
    const auto index = static_cast<std::size_t>(on_host.const_data_ptr<std::int64_t>()[i]);
    // On a device a broadcast that failed is found out only later.
    if (index >= dense_ || seen[index])
      throw Error("the ranks could not agree on an order of buckets: a broadcast has failed",
                  {.rank = group_.rank(), .call = "backward"});
    seen[index] = true;
    first_comes_last.push_back(index);
  }
  make_plan(first_comes_last);
  tell_plan("buckets rebuilt in the order in which gradients came");
}

}  // namespace ddpkit
