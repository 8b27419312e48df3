#include "parallel/ddp/gradient_memory.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <cstring>
#include <map>

#include "comm/arena.h"
#include "comm/backends.h"
#include "comm/host_memory.h"
#include "comm/shm/arena.h"
#include "tensor/is_alone.h"
#include "tensor/stream_set.h"

namespace ddpkit {
namespace {

/// Gradients start on cache lines of their own in a buffer, whatever the parameter before them measures.
constexpr std::size_t kAlignment = 64;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// A tensor on part of `flat`'s memory, but not an autograd view of it: Optimizer::zero_grad() detaches gradients in
/// place, which a view refuses.
at::Tensor alias(const at::Tensor& flat, std::int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const at::NoGradGuard no_grad;
  return at::empty({0}, flat.options()).set_(flat.storage(), flat.storage_offset() + offset, sizes, strides);
}

void copy_values(const at::Tensor& to, const at::Tensor& from) {
  const bool plain = to.is_cpu() && from.is_cpu() && to.scalar_type() == from.scalar_type() &&
                     to.strides() == from.strides() && from.is_non_overlapping_and_dense() && !from.is_conj() &&
                     !from.is_neg();
  // For the many small ones: a tenth of the time of a trip through the dispatcher.
  if (plain) {
    std::memcpy(to.data_ptr(), from.const_data_ptr(), from.nbytes());
  } else {
    const at::NoGradGuard no_grad;
    to.copy_(from);
  }
}

}  // namespace

GradientMemory::GradientMemory(const std::vector<NamedParameter>& parameters, Strides strides, ProcessGroup group,
                               const Options& options)
    : group_(std::move(group)), own_(dynamic_cast<OwnBackend*>(group_.backend().get())), options_(options) {
  on_device_ = !group_.device().is_cpu();
  flat_ = options.flat || !own_;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Entry& entry = entries_.emplace_back();
    entry.parameter = parameters[i].tensor;
    entry.strides = std::move(strides[i]);
    bytes += parameters[i].tensor.nbytes() + 2 * kAlignment;
  }
  if (flat_ || !options.arena) return;
  // Room for the gradients and for what the step computes on its way to them.
  const std::size_t reserve = bytes + bytes / 2;
  const std::size_t fair = arena_budget(static_cast<std::size_t>(std::max(1, group_.local_world_size())));
  const std::size_t wanted = std::min(std::max(8 * bytes, std::size_t{1} << 30), std::max(fair, reserve));
  const std::size_t capacity = std::max(options.arena_bytes.value_or(wanted), reserve);
  // One rank alone shares nothing, but gains as much by memory that is kept from step to step.
  arena_ = group_.world_size() == 1 ? ArenaLease::open_private(capacity) : own_->open_arena(capacity, reserve);
}

GradientMemory::~GradientMemory() = default;

std::optional<ArenaStats> GradientMemory::arena() const {
  return arena_ ? std::optional(arena_->stats()) : std::nullopt;
}

void GradientMemory::lay_out(const std::vector<std::vector<std::size_t>>& plan) {
  const bool first = plan_.empty();
  plan_ = plan;
  bucket_of_.assign(entries_.size(), 0);
  arriving_ = std::vector<Copies>(plan.size());
  for (std::size_t b = 0; b < plan.size(); ++b) {
    for (const std::size_t index : plan[b]) bucket_of_[index] = b;
  }
  if (flat_ && sharded_) {
    lay_out_sections();
  } else if (flat_) {
    lay_out_flat();
  } else if (first && group_.world_size() > 1) {
    lay_out_homes();  // They stay where they are, whatever bucket they are reduced with.
  }
}

void GradientMemory::lay_out_flat() {
  buffers_.clear();
  for (const auto& members : plan_) {
    const at::ScalarType dtype = entries_[members[0]].parameter.scalar_type();
    const std::size_t element = c10::elementSize(dtype);
    std::size_t bytes = 0;
    for (const std::size_t index : members) bytes += aligned(entries_[index].parameter.nbytes());
    const at::Tensor& buffer =
        buffers_.emplace_back(group_.allocate({static_cast<std::int64_t>(bytes / element)}, dtype));
    buffer.zero_();
    std::size_t offset = 0;
    for (const std::size_t index : members) {
      Entry& entry = entries_[index];
      entry.home = alias(buffer, static_cast<std::int64_t>(offset / element), entry.parameter.sizes(), entry.strides);
      offset += aligned(entry.parameter.nbytes());
    }
  }
}

/// With an arena only for the small gradients, which it does not serve.
void GradientMemory::lay_out_homes() {
  std::map<at::ScalarType, std::vector<Entry*>> kinds;
  for (Entry& entry : entries_) {
    if (!arena_ || entry.parameter.nbytes() < shm::Arena::kSmallest)
      kinds[entry.parameter.scalar_type()].push_back(&entry);
  }
  for (const auto& [dtype, entries] : kinds) {
    const std::size_t element = c10::elementSize(dtype);
    std::size_t bytes = 0;
    for (const Entry* entry : entries) bytes += aligned(entry->parameter.nbytes());
    const at::Tensor all = group_.allocate({static_cast<std::int64_t>(bytes / element)}, dtype);
    std::size_t offset = 0;
    for (Entry* entry : entries) {
      entry->home = alias(all, static_cast<std::int64_t>(offset / element), entry->parameter.sizes(), entry->strides);
      offset += aligned(entry->parameter.nbytes());
    }
  }
}

at::Tensor GradientMemory::home_for(Entry& entry) {
  if (entry.home.defined()) return entry.home;
  const at::Tensor& parameter = entry.parameter;
  const at::Tensor flat = !arena_ || group_.world_size() == 1
                              ? at::empty({parameter.numel()}, parameter.options().requires_grad(false))
                              : arena_->empty(parameter.numel(), parameter.scalar_type());
  return alias(flat, 0, parameter.sizes(), entry.strides);
}

bool GradientMemory::reducible(const at::Tensor& gradient, const Entry& entry, const at::Tensor& added) const {
  if (flat_ || gradient.strides() != at::IntArrayRef(entry.strides) || !gradient.is_non_overlapping_and_dense() ||
      gradient.is_conj() || gradient.is_neg())
    return false;
  if (group_.world_size() == 1) return true;
  // Of other symmetric memory nobody knows whether all ranks still map it.
  return arena_ && arena_->contains(gradient.const_data_ptr()) && is_alone(gradient, added);
}

void GradientMemory::take(std::size_t index, const at::Tensor& added) {
  Entry& entry = entries_[index];
  const at::Tensor& gradient = entry.parameter.grad();
  if (!gradient.defined()) return take_unused(index);
  if (flat_ && sharded_) return put_into_sections(index, gradient);
  const bool at_home = entry.home.defined() && gradient.const_data_ptr() == entry.home.const_data_ptr() &&
                       gradient.strides() == entry.home.strides();
  if (at_home || reducible(gradient, entry, added)) {
    entry.piece = gradient;
    return;
  }
  entry.piece = home_for(entry);
  if (on_device_) {
    arriving_[bucket_of_[index]].to.push_back(entry.piece);
    arriving_[bucket_of_[index]].from.push_back(gradient);
  } else {
    copy_values(entry.piece, gradient);
  }
}

/// One kernel, or a few, for all of them.
void GradientMemory::copy_all(Copies& copies) {
  const at::NoGradGuard no_grad;
  if (!copies.to.empty()) at::_foreach_copy_(copies.to, copies.from);
  copies = {};
}

void GradientMemory::gather(std::size_t bucket) { copy_all(arriving_[bucket]); }

void GradientMemory::scatter() { copy_all(leaving_); }

void GradientMemory::forget() noexcept {
  for (Copies& copies : arriving_) copies = {};
  leaving_ = {};
}

void GradientMemory::keep_alive_for(const StreamSet& streams) const {
  for (const at::Tensor& buffer : buffers_) streams.keep_alive(buffer);
}

void GradientMemory::take_unused(std::size_t index) {
  Entry& entry = entries_[index];
  const at::Tensor& gradient = entry.parameter.grad();
  if (flat_ && sharded_) return put_into_sections(index, gradient);
  const at::Tensor home = home_for(entry);
  if (!gradient.defined()) {
    const at::NoGradGuard no_grad;
    home.zero_();
  } else if (gradient.const_data_ptr() != home.const_data_ptr()) {
    copy_values(home, gradient);
  }
  entry.piece = home;
}

Work GradientMemory::start(std::size_t bucket) {
  if (sharded_) return start_sharded(bucket);
  if (flat_) return group_.all_reduce_async(buffers_[bucket], ReduceOp::kAvg);
  if (group_.world_size() == 1) return {};
  std::vector<at::Tensor> pieces;
  for (const std::size_t index : plan_[bucket]) {
    if (entries_[index].piece.numel() != 0) pieces.push_back(entries_[index].piece);
  }
  if (pieces.empty()) return {};
  return Work(own_->all_reduce_in_place(pieces, c10d::ReduceOp::AVG));
}

void GradientMemory::give(std::size_t index) {
  Entry& entry = entries_[index];
  const at::Tensor piece = std::move(entry.piece);
  entry.piece.reset();
  at::Tensor& gradient = entry.parameter.mutable_grad();
  if (gradient.defined() && gradient.const_data_ptr() == piece.const_data_ptr()) return;
  if (options_.as_bucket_view || (!gradient.defined() && !entry.home.defined())) {
    gradient = piece;
    return;
  }
  if (!gradient.defined()) gradient = at::empty_like(piece);
  if (on_device_) {
    leaving_.to.push_back(gradient);
    leaving_.from.push_back(piece);
  } else {
    copy_values(gradient, piece);
  }
}

}  // namespace ddpkit
