#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <utility>

#include "comm/arena_allocator.h"
#include "comm/backend.h"
#include "comm/host.h"
#include "comm/shm/arena.h"
#include "comm/symmetric_memory.h"
#include "parallel/ddp/bucket_storage.h"
#include "tensor/flat_layout.h"
#include "tensor/tensor_memory.h"

namespace ddpkit {
namespace {

/// CPU only.
class InPlaceStorage final : public BucketStorage {
 public:
  InPlaceStorage(const std::vector<NamedParameter>& parameters, const Strides& strides, ProcessGroup group,
                 SymmetricMemory& memory, bool gradient_as_bucket_view, bool arena,
                 std::optional<std::size_t> arena_bytes)
      : group_(std::move(group)), memory_(memory), as_bucket_view_(gradient_as_bucket_view) {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      entries_.push_back({.parameter = parameters[i].tensor, .strides = strides[i]});
      bytes += parameters[i].tensor.nbytes() + 2 * kAlignment;
    }
    if (arena) open_arena(bytes, arena_bytes);
  }

  bool in_place() const noexcept override { return true; }

  void lay_out(const BucketPlan& plan, const std::vector<FlatLayout>& layouts, bool sharded) override {
    const bool first = plan_.empty();
    sharded_ = sharded;
    plan_ = plan;
    layouts_ = layouts;
    shards_.assign(plan.size(), {});
    if (first && group_.world_size() > 1) allocate_views();  // Views keep their memory in all bucket plans.
  }

  void add(std::size_t param, const at::Tensor& added) override {
    Entry& entry = entries_[param];
    const at::Tensor& gradient = entry.parameter.grad();
    if (!gradient.defined()) return add_unused(param);
    if ((entry.view.defined() && is_at(gradient, entry.view)) || reducible(gradient, entry, added)) {
      entry.operand = gradient;
    } else {
      entry.operand = view_for(entry);
      copy_values(entry.operand, gradient);
    }
  }

  void add_unused(std::size_t param) override {
    Entry& entry = entries_[param];
    entry.operand = view_for(entry);
    copy_or_zero(entry.operand, entry.parameter.grad());
  }

  Work reduce(std::size_t bucket) override {
    std::vector<at::Tensor> operands;
    for (const std::size_t param : plan_[bucket]) {
      if (entries_[param].operand.numel() != 0) operands.push_back(entries_[param].operand);
    }
    if (sharded_) shards_[bucket] = make_shard(bucket);
    if (operands.empty() || group_.world_size() == 1) return {};
    return Work(sharded_ ? memory_.reduce_scatter_coalesced(operands, shards_[bucket], c10d::ReduceOp::AVG)
                         : memory_.all_reduce_coalesced(operands, c10d::ReduceOp::AVG));
  }

  void write_back(std::size_t param) override {
    Entry& entry = entries_[param];
    const at::Tensor operand = std::exchange(entry.operand, {});
    at::Tensor& gradient = entry.parameter.mutable_grad();
    const bool replace = as_bucket_view_ || (!gradient.defined() && !entry.view.defined());
    if (needs_copy(gradient, operand, replace)) copy_values(gradient, operand);
  }

  at::Tensor take_shard(std::size_t bucket, const StreamSet&) override {
    for (const std::size_t param : plan_[bucket]) entries_[param].operand.reset();
    return std::exchange(shards_[bucket], {});
  }

  void restore(std::size_t param) override { entries_[param].operand.reset(); }

  std::optional<ArenaStats> arena() const override { return arena_ ? std::optional(arena_->stats()) : std::nullopt; }

 private:
  struct Entry {
    at::Tensor parameter;
    std::vector<std::int64_t> strides;
    at::Tensor view = {};     ///< This gradient's view of the storage. Undefined if it is allocated on demand.
    at::Tensor operand = {};  ///< The tensor being reduced: the parameter's gradient, or a copy.
  };

  /// Opens an arena for the gradients, `bytes` in total, and for the intermediate results of backward.
  void open_arena(std::size_t bytes, std::optional<std::size_t> requested) {
    const std::size_t reserve = bytes + bytes / 2;
    const std::size_t fair = arena_budget(static_cast<std::size_t>(std::max(1, group_.local_world_size())));
    const std::size_t wanted = std::min(std::max(8 * bytes, std::size_t{1} << 30), std::max(fair, reserve));
    const std::size_t capacity = std::max(requested.value_or(wanted), reserve);
    arena_ = memory_.open_arena(capacity, reserve);
  }

  /// With an arena, allocates views only for gradients that are too small for the arena.
  void allocate_views() {
    std::map<at::ScalarType, std::vector<Entry*>> kinds;
    for (Entry& entry : entries_) {
      if (!arena_ || entry.parameter.nbytes() < shm::Arena::kSmallest)
        kinds[entry.parameter.scalar_type()].push_back(&entry);
    }
    for (const auto& [dtype, entries] : kinds) {
      std::vector<std::int64_t> numels;
      for (const Entry* entry : entries) numels.push_back(entry->parameter.numel());
      const FlatLayout layout = make_flat_layout(std::move(numels), c10::elementSize(dtype));
      const at::Tensor all = group_.allocate({layout.numel}, dtype);
      for (std::size_t i = 0; i < entries.size(); ++i)
        entries[i]->view = alias(all, layout.offsets[i], entries[i]->parameter.sizes(), entries[i]->strides);
    }
  }

  at::Tensor view_for(const Entry& entry) {
    if (entry.view.defined()) return entry.view;
    const at::Tensor& parameter = entry.parameter;
    const at::Tensor flat = !arena_ || group_.world_size() == 1
                                ? at::empty({parameter.numel()}, parameter.options().requires_grad(false))
                                : arena_->empty(parameter.numel(), parameter.scalar_type());
    return alias(flat, 0, parameter.sizes(), entry.strides);
  }

  bool reducible(const at::Tensor& gradient, const Entry& entry, const at::Tensor& added) const {
    if (gradient.strides() != at::IntArrayRef(entry.strides) || !gradient.is_non_overlapping_and_dense() ||
        gradient.is_conj() || gradient.is_neg())
      return false;
    if (group_.world_size() == 1) return true;
    // For other symmetric memory, it is unknown whether all ranks still map it.
    return arena_ && arena_->contains(gradient.const_data_ptr()) && is_sole_owner(gradient, added);
  }

  /// Allocates a shard. The only rank copies the gradients to the shard.
  at::Tensor make_shard(std::size_t bucket) const {
    const FlatLayout& layout = layouts_[bucket];
    const at::Tensor& any = entries_[plan_[bucket][0]].parameter;
    const at::Tensor shard = at::empty({layout.shard_numel}, any.options().requires_grad(false));
    for (std::size_t i = 0; group_.world_size() == 1 && i < layout.numels.size(); ++i)
      copy_values(shard.narrow(0, layout.offsets[i], layout.numels[i]), in_order(entries_[plan_[bucket][i]].operand));
    return shard;
  }

  ProcessGroup group_;
  SymmetricMemory& memory_;
  bool as_bucket_view_;
  std::shared_ptr<ScopedArena> arena_;
  std::vector<Entry> entries_;  ///< [param]
  BucketPlan plan_;
  std::vector<FlatLayout> layouts_;  ///< [bucket]
};

}  // namespace

std::unique_ptr<BucketStorage> make_in_place_storage(const std::vector<NamedParameter>& parameters,
                                                     const Strides& strides, const ProcessGroup& group,
                                                     bool gradient_as_bucket_view, bool arena,
                                                     std::optional<std::size_t> arena_bytes) {
  SymmetricMemory* memory = Backend::of(group)->symmetric_memory();
  if (!memory) return nullptr;
  return std::make_unique<InPlaceStorage>(parameters, strides, group, *memory, gradient_as_bucket_view, arena,
                                          arena_bytes);
}

}  // namespace ddpkit
