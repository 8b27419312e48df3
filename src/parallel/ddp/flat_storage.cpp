#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "parallel/ddp/bucket_storage.h"
#include "parallel/sharding/shard.h"
#include "tensor/flat_layout.h"
#include "tensor/tensor_memory.h"

namespace ddpkit {
namespace {

/// On a device, copies are collected: a few kernels copy all tensors.
struct Copies {
  std::vector<at::Tensor> to, from;

  void add(const at::Tensor& target, const at::Tensor& source) {
    if (target.is_cpu()) return copy_values(target, source);
    to.push_back(target);
    from.push_back(source);
  }
  void flush() {
    const at::NoGradGuard no_grad;
    if (!to.empty()) at::_foreach_copy_(to, from);
    *this = {};
  }
};

class FlatStorage final : public BucketStorage {
 public:
  FlatStorage(const std::vector<NamedParameter>& parameters, const Strides& strides, ProcessGroup group,
              bool as_bucket_view)
      : group_(std::move(group)), as_bucket_view_(as_bucket_view) {
    for (std::size_t i = 0; i < parameters.size(); ++i)
      entries_.push_back({.parameter = parameters[i].tensor, .strides = strides[i]});
  }

  bool in_place() const noexcept override { return false; }

  /// Sharded: each rank's section of the buffer holds its shard of each gradient, so one reduce-scatter reduces a
  /// bucket. Otherwise one section holds whole gradients.
  void lay_out(const BucketPlan& plan, bool sharded) override {
    sharded_ = sharded;
    plan_ = plan;
    copies_in_.assign(plan.size(), {});
    buffers_.clear();
    const int sections = sharded ? group_.world_size() : 1;
    for (std::size_t b = 0; b < plan.size(); ++b) {
      const at::Tensor& any = entries_[plan[b][0]].parameter;
      std::int64_t numel = 0;
      for (const std::size_t param : plan[b]) {
        entries_[param].bucket = b;
        entries_[param].offset = numel;
        numel += aligned_numel(shard(param, 0, sections).count, any.element_size());
      }
      const at::Tensor& buffer = buffers_.emplace_back(group_.allocate({sections * numel}, any.scalar_type()));
      buffer.zero_();
      for (const std::size_t param : plan[b]) {
        Entry& entry = entries_[param];
        entry.view = sharded ? at::Tensor() : alias(buffer, entry.offset, entry.parameter.sizes(), entry.strides);
      }
    }
  }

  void add(std::size_t param, const at::Tensor&) override {
    const Entry& entry = entries_[param];
    const at::Tensor& gradient = entry.parameter.grad();
    if (!gradient.defined() || sharded_) return add_unused(param);
    if (!is_at(gradient, entry.view)) copies_in_[entry.bucket].add(entry.view, gradient);
  }

  void add_unused(std::size_t param) override {
    const Entry& entry = entries_[param];
    const at::Tensor& gradient = entry.parameter.grad();
    sharded_ ? copy_to_sections(entry, param, gradient) : copy_or_zero(entry.view, gradient);
  }

  void flush_copies_in(std::size_t bucket) override { copies_in_[bucket].flush(); }

  Work reduce(std::size_t bucket) override {
    const at::Tensor& buffer = buffers_[bucket];
    if (!sharded_) return group_.all_reduce_async(buffer, ReduceOp::kAvg);
    const at::Tensor sections = buffer.view({group_.world_size(), -1});
    const at::Tensor section = at::empty({sections.size(1)}, buffer.options());
    for (const std::size_t param : plan_[bucket]) {
      const std::int64_t count = shard(param, group_.rank(), group_.world_size()).count;
      entries_[param].shard = section.narrow(0, entries_[param].offset, count);
    }
    return group_.reduce_scatter_async(section, sections, ReduceOp::kAvg);
  }

  void write_back(std::size_t param) override {
    Entry& entry = entries_[param];
    at::Tensor& gradient = entry.parameter.mutable_grad();
    if (needs_copy(gradient, entry.view, as_bucket_view_)) copies_out_.add(gradient, entry.view);
  }

  void flush_copies_out() override { copies_out_.flush(); }

  at::Tensor take_shard(std::size_t param) override {
    entries_[param].parameter.mutable_grad().reset();
    return std::exchange(entries_[param].shard, {});
  }

  void restore(std::size_t param) override { entries_[param].shard.reset(); }

  void reset() noexcept override {
    for (Copies& copies : copies_in_) copies = {};
    copies_out_ = {};
  }

  void keep_alive_for(const StreamSet& streams) const override {
    for (const at::Tensor& buffer : buffers_) streams.keep_alive(buffer);
  }
  at::Tensor flat(std::size_t bucket) const override { return buffers_[bucket]; }
  at::Tensor bucket_view(std::size_t param) const override { return entries_[param].view; }

 private:
  struct Entry {
    at::Tensor parameter;
    std::vector<std::int64_t> strides;
    std::size_t bucket = 0;
    std::int64_t offset = 0;  ///< Offset in its section, in elements.
    at::Tensor view = {};     ///< The gradient's part of the buffer. Undefined if sharded.
    at::Tensor shard = {};    ///< This rank's shard of the average.
  };

  Shard shard(std::size_t param, int rank, int ranks) const { return shard_of(entries_[param].parameter, rank, ranks); }

  /// An undefined gradient counts as zero.
  void copy_to_sections(const Entry& entry, std::size_t param, const at::Tensor& gradient) {
    const at::NoGradGuard no_grad;
    at::Tensor elements;
    if (gradient.defined()) {
      at::Tensor laid_out = gradient;
      if (gradient.strides() != at::IntArrayRef(entry.strides) || !gradient.is_non_overlapping_and_dense()) {
        laid_out = at::empty_strided(gradient.sizes(), entry.strides, entry.parameter.options().requires_grad(false));
        laid_out.copy_(gradient);
      }
      elements = in_order(laid_out);
    }
    const at::Tensor sections = buffers_[entry.bucket].view({group_.world_size(), -1});
    for (int r = 0; r < group_.world_size(); ++r) {
      const Shard part = shard(param, r, group_.world_size());
      const at::Tensor place = sections[r].narrow(0, entry.offset, part.count);
      elements.defined() ? place.copy_(part.of(elements)) : place.zero_();
    }
  }

  ProcessGroup group_;
  bool as_bucket_view_;
  std::vector<Entry> entries_;       ///< [param]
  std::vector<at::Tensor> buffers_;  ///< [bucket]
  std::vector<Copies> copies_in_;    ///< [bucket]
  Copies copies_out_;
};

}  // namespace

std::unique_ptr<BucketStorage> make_flat_storage(const std::vector<NamedParameter>& parameters, const Strides& strides,
                                                 const ProcessGroup& group, const ReducerOptions& options) {
  return std::make_unique<FlatStorage>(parameters, strides, group, options.gradient_as_bucket_view);
}

}  // namespace ddpkit
