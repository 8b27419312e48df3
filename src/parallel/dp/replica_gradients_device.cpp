// Replicas on other devices than the CPU. One thread of autograd's serves a device, and with it all replicas there: so
// no hook ever waits for another replica. Whichever gradient of a bucket comes last queues the bucket's sum, on streams
// that wait for all the others.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <set>

#include "comm/cuda.h"
#include "parallel/dp/replica_gradients.h"
#include "parallel/dp/replica_streams.h"
#include "tensor/tensor_memory.h"

namespace ddpkit {
namespace {

bool same_place(const at::Tensor& gradient, const at::Tensor& like) {
  return gradient.layout() == at::kStrided && gradient.scalar_type() == like.scalar_type() &&
         gradient.sizes() == like.sizes() && gradient.strides() == like.strides() &&
         gradient.is_non_overlapping_and_dense() && !gradient.is_conj() && !gradient.is_neg();
}

}  // namespace

bool ReplicaGradients::on_device() const noexcept { return streams_.used(); }

/// Under the lock.
void ReplicaGradients::note_stream(std::size_t replica, std::size_t bucket) {
  buckets_[bucket].writers[replica].add_current();
}

/// Under the lock. All gradients of the bucket are queued somewhere, or will never come.
void ReplicaGradients::sum_on_device(std::size_t b) {
  const at::NoGradGuard no_grad;
  Bucket& bucket = buckets_[b];
  std::vector<std::size_t> alike, others;
  for (const std::size_t param : plan_[b]) {
    const Slot& slot = slots_[param];
    if (slot.gradients.empty() || (slot.gradients.size() == 1 && slot.sum.device() == leaves_[0][param].device()))
      continue;
    const bool plain = active_ > 1 && static_cast<int>(slot.gradients.size()) == active_ &&
                       std::all_of(slot.gradients.begin(), slot.gradients.end(),
                                   [&](const at::Tensor& gradient) { return same_place(gradient, slot.gradients[0]); });
    (plain ? alike : others).push_back(param);
  }
  for (int r = 0; r < active_; ++r) {
    const auto replica = static_cast<std::size_t>(r);
    // The side stream reads gradients after the streams that make them.
    for (const c10::Stream& writer : bucket.writers[replica].streams()) stream_waits(streams_.side(replica), writer);
  }
  if (alike.empty() && others.empty()) return;
  const c10::MultiStreamGuard on_sides(streams_.sides());
  const c10::DeviceGuard first_device(leaves_[0][0].device());
  if (!alike.empty() && !sum_by_nccl(alike)) {
    std::vector<at::Tensor> sums;
    for (const std::size_t param : alike) sums.push_back(slots_[param].gradients[0]);
    for (std::size_t r = 1; r < static_cast<std::size_t>(active_); ++r) {
      std::vector<at::Tensor> added;
      for (const std::size_t param : alike) added.push_back(slots_[param].gradients[r].to(sums[0].device(), true));
      // Not in place: two gradients of a replica may be one tensor.
      sums = at::_foreach_add(sums, added);
    }
    for (std::size_t i = 0; i < alike.size(); ++i) slots_[alike[i]].sum = sums[i];
  }
  for (const std::size_t param : others)
    slots_[param].sum = sum_on_first(slots_[param].gradients, leaves_[0][param].device());
}

/// Where each replica has a device of its own. False: nothing has been done.
bool ReplicaGradients::sum_by_nccl(const std::vector<std::size_t>& params) {
  std::set<c10::DeviceIndex> devices;
  std::vector<at::Tensor> flats;
  std::vector<c10::Stream> sides;
  for (std::size_t r = 0; r < static_cast<std::size_t>(active_); ++r) {
    devices.insert(leaves_[r][params[0]].device().index());
    sides.push_back(streams_.side(r));
  }
  if (devices.size() != static_cast<std::size_t>(active_)) return false;
  for (std::size_t r = 0; r < static_cast<std::size_t>(active_); ++r) {
    const c10::DeviceGuard device(leaves_[r][params[0]].device());
    std::vector<at::Tensor> runs;  // In the order of memory, the same in all replicas.
    for (const std::size_t param : params) {
      const at::Tensor& gradient = slots_[param].gradients[r];
      runs.push_back(gradient.as_strided({gradient.numel()}, {1}));
    }
    flats.push_back(at::cat(runs));
  }
  if (!cuda::reduce(flats, sides)) return false;
  std::int64_t offset = 0;
  for (const std::size_t param : params) {
    Slot& slot = slots_[param];
    const at::Tensor& like = slot.gradients[0];
    slot.sum = alias(flats[0], offset, like.sizes(), like.strides());
    offset += like.numel();
  }
  return true;
}

at::Tensor sum_on_first(const std::vector<at::Tensor>& gradients, c10::Device device) {
  at::Tensor sum;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    const at::Tensor here = gradient.to(device, /*non_blocking=*/true);
    sum = !sum.defined() ? here : sum.is_sparse() && !here.is_sparse() ? at::add(here, sum) : at::add(sum, here);
  }
  return sum;
}

}  // namespace ddpkit
