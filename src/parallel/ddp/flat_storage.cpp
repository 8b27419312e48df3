#include <ATen/ATen.h>

#include <optional>
#include <utility>

#include "comm/backend.h"
#include "parallel/ddp/bucket_storage.h"
#include "tensor/tensor_memory.h"

namespace ddpkit {
namespace {

class FlatStorage final : public BucketStorage {
 public:
  FlatStorage(const std::vector<NamedParameter>& parameters, const Strides& strides, ProcessGroup group,
              ProcessGroup shards, bool as_bucket_view, bool on_demand, std::optional<at::ScalarType> dtype)
      : group_(std::move(group)),
        shard_group_(std::move(shards)),
        on_demand_(on_demand),
        by_all_reduce_(Backend::of(shard_group_)->scatters_by_all_reduce()),
        as_bucket_view_(as_bucket_view && !dtype),
        dtype_(dtype) {
    for (std::size_t i = 0; i < parameters.size(); ++i)
      entries_.push_back({.parameter = parameters[i].tensor, .strides = strides[i]});
  }

  bool in_place() const noexcept override { return false; }

  void lay_out(const BucketPlan& plan, const std::vector<FlatLayout>& layouts, bool sharded) override {
    sharded_ = sharded;
    plan_ = plan;
    layouts_ = layouts;
    copies_in_.assign(plan.size(), {});
    shards_.assign(plan.size(), {});
    buffers_.assign(plan.size(), {});
    for (std::size_t b = 0; b < plan.size(); ++b) {
      for (const std::size_t param : plan[b]) {
        entries_[param].bucket = b;
        entries_[param].view.reset();
      }
      if (!sharded && !on_demand_) use_buffer(b, group_.allocate({layouts[b].numel}, dtype_of_bucket(b)).zero_());
    }
  }

  void add(std::size_t param, const at::Tensor&) override {
    const Entry& entry = entry_with_view(param);
    const at::Tensor& gradient = entry.parameter.grad();
    if (!gradient.defined()) return add_unused(param);
    if (!is_at(gradient, entry.view)) copies_in_[entry.bucket].add(entry.view, gradient);
  }

  void add_unused(std::size_t param) override {
    const Entry& entry = entry_with_view(param);
    copy_or_zero(entry.view, entry.parameter.grad());
  }

  void flush_copies_in(std::size_t bucket) override { copies_in_[bucket].flush(); }

  Work reduce(std::size_t bucket) override {
    const at::Tensor& buffer = buffers_[bucket];
    if (!sharded_) return group_.all_reduce_async(buffer, ReduceOp::kAvg);
    if (by_all_reduce_) return shard_group_.all_reduce_async(buffer, ReduceOp::kAvg);
    const at::Tensor sections = sections_of(bucket);
    shards_[bucket] = at::empty({sections.size(1)}, buffer.options());
    return shard_group_.reduce_scatter_async(shards_[bucket], sections, ReduceOp::kAvg);
  }

  void write_back(std::size_t param) override {
    Entry& entry = entries_[param];
    at::Tensor& gradient = entry.parameter.mutable_grad();
    if (!gradient.defined() && entry.view.scalar_type() != entry.parameter.scalar_type())
      gradient = at::empty_like(entry.view, entry.parameter.scalar_type());
    if (needs_copy(gradient, entry.view, as_bucket_view_)) copies_out_.add(gradient, entry.view);
  }

  void flush_copies_out() override { copies_out_.flush(); }

  at::Tensor take_shard(std::size_t bucket, const StreamSet& seen) override {
    if (by_all_reduce_) shards_[bucket] = sections_of(bucket)[shard_group_.rank()].clone();
    // Whole gradients of a sharded bucket live only until their shard is taken.
    seen.keep_alive(buffers_[bucket]);
    buffers_[bucket].reset();
    for (const std::size_t param : plan_[bucket]) entries_[param].view.reset();
    return std::exchange(shards_[bucket], {});
  }

  void reset() noexcept override {
    for (CopyList& copies : copies_in_) copies.clear();
    for (at::Tensor& shard : shards_) shard.reset();
    copies_out_.clear();
  }

  void keep_alive_for(const StreamSet& streams) const override {
    for (const at::Tensor& buffer : buffers_) {
      if (buffer.defined()) streams.keep_alive(buffer);
    }
  }
  at::Tensor flat(std::size_t bucket) const override { return buffers_[bucket]; }
  at::Tensor bucket_view(std::size_t param) const override { return entries_[param].view; }

 private:
  struct Entry {
    at::Tensor parameter;
    std::vector<std::int64_t> strides;
    std::size_t bucket = 0;
    at::Tensor view = {};  ///< The gradient's part of the buffer.
  };

  at::ScalarType dtype_of_bucket(std::size_t bucket) const {
    const at::ScalarType own = entries_[plan_[bucket][0]].parameter.scalar_type();
    return at::isFloatingType(own) ? dtype_.value_or(own) : own;
  }

  at::Tensor sections_of(std::size_t bucket) const {
    const at::Tensor& buffer = buffers_[bucket];
    return buffer.view({shard_group_.world_size(), buffer.numel() / shard_group_.world_size()});
  }

  void use_buffer(std::size_t bucket, const at::Tensor& buffer) {
    buffers_[bucket] = buffer;
    for (std::size_t i = 0; i < plan_[bucket].size(); ++i) {
      Entry& entry = entries_[plan_[bucket][i]];
      entry.view = alias(buffer, layouts_[bucket].offsets[i], entry.parameter.sizes(), entry.strides);
    }
  }

  const Entry& entry_with_view(std::size_t param) {
    const Entry& entry = entries_[param];
    if (!entry.view.defined())
      use_buffer(entry.bucket, at::zeros({layouts_[entry.bucket].numel},
                                         at::TensorOptions(dtype_of_bucket(entry.bucket)).device(group_.device())));
    return entry;
  }

  ProcessGroup group_, shard_group_;
  bool on_demand_;
  bool by_all_reduce_;  ///< In the buffer. A reduce-scatter would copy the buffer first.
  bool as_bucket_view_;
  std::optional<at::ScalarType> dtype_;  ///< Of the buffers of floating gradients. Empty: that of the gradients.
  BucketPlan plan_;
  std::vector<FlatLayout> layouts_;  ///< [bucket]
  std::vector<Entry> entries_;       ///< [param]
  std::vector<at::Tensor> buffers_;  ///< [bucket]
  std::vector<CopyList> copies_in_;  ///< [bucket]
  CopyList copies_out_;
};

}  // namespace

std::unique_ptr<BucketStorage> make_flat_storage(const std::vector<NamedParameter>& parameters, const Strides& strides,
                                                 const ProcessGroup& group, const ProcessGroup& shards,
                                                 bool gradient_as_bucket_view, bool on_demand,
                                                 std::optional<at::ScalarType> dtype) {
  return std::make_unique<FlatStorage>(parameters, strides, group, shards, gradient_as_bucket_view, on_demand, dtype);
}

}  // namespace ddpkit
