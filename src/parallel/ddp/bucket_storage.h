// Tier 1. Where gradients are while they are reduced.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include <ddpkit/comm/arena_stats.h>
#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/reducer.h>

#include "parallel/model_agreement.h"
#include "tensor/stream_set.h"
#include "tensor/tensor_memory.h"

namespace ddpkit {

using BucketPlan = std::vector<std::vector<std::size_t>>;  ///< [bucket][position]: a parameter

/// The gradients of dense parameters, in buckets. Backward adds each gradient; a bucket whose gradients have all been
/// added is reduced; each of its gradients is then written back to the parameter, taken as a shard, or restored.
class BucketStorage {
 public:
  virtual ~BucketStorage() = default;

  /// Collective: makes room for buckets of these parameters. `sharded`: from now on reduce() gives each rank only its
  /// shard of each averaged gradient.
  virtual void lay_out(const BucketPlan& plan, bool sharded) = 0;
  bool sharded() const noexcept { return sharded_; }
  /// Whether gradients are reduced where autograd has made them, if possible. If not, a bucket has a flat buffer.
  virtual bool in_place() const noexcept = 0;

  /// Autograd has accumulated `added` in the gradient of the parameter.
  virtual void add(std::size_t param, const at::Tensor& added) = 0;
  /// The parameter took no part in backward: this rank contributes the previous gradient, or zeros.
  virtual void add_unused(std::size_t param) = 0;
  /// Before the bucket is reduced: noted copies are queued on the current stream.
  virtual void flush_copies_in(std::size_t) {}
  /// Averages the bucket over the ranks.
  virtual Work reduce(std::size_t bucket) = 0;

  /// Puts the average into the parameter's gradient. On a device flush_copies_out() does so, for all.
  virtual void write_back(std::size_t param) = 0;
  virtual void flush_copies_out() {}
  /// This rank's shard of the average, one-dimensional. The parameter loses its gradient.
  virtual at::Tensor take_shard(std::size_t param) = 0;
  /// Leaves the parameter's gradient as it was before add_unused().
  virtual void restore(std::size_t) {}
  /// A backward has failed.
  virtual void reset() noexcept {}

  /// The allocator does not reuse the memory before the streams have finished their present work on it.
  virtual void keep_alive_for(const StreamSet&) const {}
  /// The bucket's buffer, and a gradient's part of it. Undefined in place.
  virtual at::Tensor flat(std::size_t) const { return {}; }
  virtual at::Tensor bucket_view(std::size_t) const { return {}; }
  virtual std::optional<ArenaStats> arena() const { return std::nullopt; }

 protected:
  /// Whether a gradient is in its view, with the elements in order.
  static bool is_at(const at::Tensor& gradient, const at::Tensor& view) {
    return same_address(gradient, view) && gradient.strides() == view.strides();
  }
  /// Prepares a gradient for its average, or replaces the gradient by the average. Whether the caller must copy.
  static bool needs_copy(at::Tensor& gradient, const at::Tensor& average, bool replace) {
    if (gradient.defined() && same_address(gradient, average)) return false;
    if (replace) {
      gradient = average;
    } else if (!gradient.defined()) {
      gradient = at::empty_like(average);
    }
    return !replace;
  }

  bool sharded_ = false;
  BucketPlan plan_;
};

/// Each bucket has one buffer, into which its gradients are copied. `strides`, the same on all ranks, order each
/// gradient's elements in messages.
std::unique_ptr<BucketStorage> make_flat_storage(const std::vector<NamedParameter>& parameters, const Strides& strides,
                                                 const ProcessGroup& group, const ReducerOptions& options);

/// Collective. The backend reduces gradients where they are, if that is its arena. A gradient is copied into the arena
/// if autograd has made it elsewhere or in another order of elements, or shares it. Null if the backend cannot.
std::unique_ptr<BucketStorage> make_in_place_storage(const std::vector<NamedParameter>& parameters,
                                                     const Strides& strides, const ProcessGroup& group,
                                                     const ReducerOptions& options);

}  // namespace ddpkit
