// Tier 1. The storage of gradients during reduction.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include <ddpkit/comm/arena_stats.h>
#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/bucket_plan.h>

#include "parallel/model_agreement.h"
#include "tensor/flat_layout.h"
#include "tensor/stream_set.h"
#include "tensor/tensor_memory.h"

namespace ddpkit {

/// The gradients of dense parameters, in buckets. Backward adds each gradient. A complete bucket is reduced. Then its
/// shard is taken, or each of its gradients is written back to the parameter or restored.
class BucketStorage {
 public:
  virtual ~BucketStorage() = default;

  /// Collective: allocates buckets for these parameters. `layouts`: gradients in the flat tensor of each bucket.
  /// `sharded`: reduce() gives each rank only its shard of the flat tensor.
  virtual void lay_out(const BucketPlan& plan, const std::vector<FlatLayout>& layouts, bool sharded) = 0;
  bool sharded() const noexcept { return sharded_; }
  /// Returns whether gradients are reduced in autograd's memory, if possible. Otherwise each bucket has a flat buffer.
  virtual bool in_place() const noexcept = 0;

  /// Autograd has accumulated `added` in the gradient of the parameter.
  virtual void add(std::size_t param, const at::Tensor& added) = 0;
  /// The parameter was not used in backward: this rank contributes the previous gradient, or zeros.
  virtual void add_unused(std::size_t param) = 0;
  /// Queues pending copies on the current stream. Call before the bucket is reduced.
  virtual void flush_copies_in(std::size_t) {}
  /// Averages the bucket over the ranks.
  virtual Work reduce(std::size_t bucket) = 0;

  /// Copies the average to the parameter's gradient. On a device, flush_copies_out() makes all these copies.
  virtual void write_back(std::size_t param) = 0;
  virtual void flush_copies_out() {}
  /// Returns this rank's shard of the average. Keeps the parameters' gradients as they were before add_unused().
  /// `seen`: all streams that have used the bucket.
  virtual at::Tensor take_shard(std::size_t bucket, const StreamSet& seen) = 0;
  /// Keeps the parameter's gradient as it was before add_unused().
  virtual void restore(std::size_t) {}
  /// Call after a failed backward.
  virtual void reset() noexcept {}

  /// The allocator does not reuse the memory before the streams have finished the work queued so far.
  virtual void keep_alive_for(const StreamSet&) const {}
  /// Return the bucket's buffer, and a gradient's part of it. Undefined if reduced in place.
  virtual at::Tensor flat(std::size_t) const { return {}; }
  virtual at::Tensor bucket_view(std::size_t) const { return {}; }
  virtual std::optional<ArenaStats> arena() const { return std::nullopt; }

 protected:
  /// Returns whether a gradient is in its view, with the same order of elements.
  static bool is_at(const at::Tensor& gradient, const at::Tensor& view) {
    return same_address(gradient, view) && gradient.strides() == view.strides();
  }
  /// Prepares a gradient for its average, or replaces the gradient by the average. Returns whether the caller must
  /// copy.
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
  std::vector<at::Tensor> shards_;  ///< This rank's shards, until they are taken. [bucket]
};

/// Each bucket has one buffer, and gradients are copied to it. `strides`: element order of each gradient in messages,
/// equal on all ranks. `group` averages whole gradients, `shards` makes shards. `on_demand`: whole gradients get their
/// buffers when they arrive, as shards do. `dtype`: of the buffers; empty: that of the gradients.
std::unique_ptr<BucketStorage> make_flat_storage(const std::vector<NamedParameter>& parameters, const Strides& strides,
                                                 const ProcessGroup& group, const ProcessGroup& shards,
                                                 bool gradient_as_bucket_view, bool on_demand,
                                                 std::optional<at::ScalarType> dtype = std::nullopt);

/// Collective. The backend reduces gradients in place if they are in its arena. Copies a gradient to the arena if
/// autograd allocated it elsewhere, with another order of elements, or shared with another tensor. Returns null if the
/// backend does not support this. For the options see ReducerOptions.
std::unique_ptr<BucketStorage> make_in_place_storage(const std::vector<NamedParameter>& parameters,
                                                     const Strides& strides, const ProcessGroup& group,
                                                     bool gradient_as_bucket_view, bool arena,
                                                     std::optional<std::size_t> arena_bytes);

}  // namespace ddpkit
