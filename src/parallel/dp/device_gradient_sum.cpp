#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <set>
#include <utility>

#include "comm/cuda.h"
#include "parallel/dp/gradient_sum.h"
#include "tensor/stream_set.h"
#include "tensor/tensor_memory.h"

namespace ddpkit {
namespace {

/// One autograd thread serves a device and all its replicas. Therefore no hook waits for another replica.
class DeviceGradientSum final : public GradientSum {
 public:
  template <class... Arguments>
  explicit DeviceGradientSum(Arguments&&... arguments)
      : GradientSum(std::forward<Arguments>(arguments)...), writers_(plan_.size()) {
    for (std::size_t b = 0; b < plan_.size(); ++b) {
      for (const Tensors& of_replica : leaves_) writers_[b].emplace_back(of_replica[plan_[b][0]].device());
    }
  }

  void begin(int active) override {
    GradientSum::begin(active);
    for (auto& of_bucket : writers_) {
      for (StreamSet& writers : of_bucket) writers.clear();
    }
  }

 private:
  void note_gradient(std::size_t replica, std::size_t param, const at::Tensor&) override {
    const std::lock_guard lock(mutex_);
    writers_[slots_[param].bucket][replica].add_current();
  }

  void sum_bucket(std::size_t b) override {
    const at::NoGradGuard no_grad;
    std::vector<std::size_t> alike, others;
    for (const std::size_t param : plan_[b]) {
      const Slot& slot = slots_[param];
      if (slot.gradients.empty() || (slot.gradients.size() == 1 && slot.sum.device() == leaves_[0][param].device()))
        continue;
      const bool plain = active_ > 1 && static_cast<int>(slot.gradients.size()) == active_ &&
                         std::all_of(slot.gradients.begin(), slot.gradients.end(), [&](const at::Tensor& gradient) {
                           return same_memory_layout(gradient, slot.gradients[0]);
                         });
      (plain ? alike : others).push_back(param);
    }
    const auto active = static_cast<std::size_t>(active_);
    for (std::size_t r = 0; r < active; ++r) {
      // The side stream reads gradients after the streams that wrote them.
      for (const c10::Stream& writer : writers_[b][r].streams()) stream_waits(streams_.side(r), writer);
    }
    if (alike.empty() && others.empty()) return;
    const c10::MultiStreamGuard on_sides(streams_.sides());
    const c10::DeviceGuard first_device(leaves_[0][0].device());
    if (!alike.empty() && !sum_by_nccl(alike)) {
      Tensors sums;
      for (const std::size_t param : alike) sums.push_back(slots_[param].gradients[0]);
      for (std::size_t r = 1; r < active; ++r) {
        Tensors added;
        for (const std::size_t param : alike) added.push_back(slots_[param].gradients[r].to(sums[0].device(), true));
        // Not in place: two gradients of a replica may be one tensor.
        sums = at::_foreach_add(sums, added);
      }
      for (std::size_t i = 0; i < alike.size(); ++i) slots_[alike[i]].sum = sums[i];
    }
    for (const std::size_t param : others)
      slots_[param].sum = sum_on_first(slots_[param].gradients, leaves_[0][param].device());
  }

  /// Works only if each replica has a separate device. Returns false if it did nothing.
  bool sum_by_nccl(const std::vector<std::size_t>& params) {
    const auto active = static_cast<std::size_t>(active_);
    std::set<c10::DeviceIndex> devices;
    Tensors flats;
    std::vector<c10::Stream> sides;
    for (std::size_t r = 0; r < active; ++r) {
      devices.insert(leaves_[r][params[0]].device().index());
      sides.push_back(streams_.side(r));
    }
    if (devices.size() != active) return false;
    for (std::size_t r = 0; r < active; ++r) {
      const c10::DeviceGuard device(leaves_[r][params[0]].device());
      Tensors runs;  // In memory order, equal in all replicas.
      for (const std::size_t param : params) {
        const at::Tensor& gradient = slots_[param].gradients[r];
        runs.push_back(gradient.as_strided({gradient.numel()}, {1}));
      }
      flats.push_back(at::cat(runs));
    }
    if (!cuda::reduce(flats, sides)) return false;
    std::int64_t offset = 0;
    for (const std::size_t param : params) {
      const at::Tensor& like = slots_[param].gradients[0];
      slots_[param].sum = alias(flats[0], offset, like.sizes(), like.strides());
      offset += like.numel();
    }
    return true;
  }

  std::vector<std::vector<StreamSet>> writers_;  ///< The streams that wrote gradients. [bucket][replica]
};

}  // namespace

std::unique_ptr<GradientSum> make_device_gradient_sum(std::vector<GradientSum::Tensors> leaves,
                                                      const ReplicaStreams& streams, std::size_t first_bucket_bytes,
                                                      std::size_t bucket_bytes) {
  return std::make_unique<DeviceGradientSum>(std::move(leaves), streams, first_bucket_bytes, bucket_bytes);
}

}  // namespace ddpkit
