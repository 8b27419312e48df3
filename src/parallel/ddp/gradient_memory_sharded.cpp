// Gradients of which each rank gets its slice.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <utility>

#include "comm/backends.h"
#include "parallel/ddp/gradient_memory.h"
#include "parallel/sharding/shard.h"

namespace ddpkit {

void GradientMemory::set_sharded(bool sharded) {
  sharded_ = sharded;
  if (!flat_) return;
  for (Entry& entry : entries_) entry.home.reset();
  buffers_.clear();
}

/// Every rank's section of the buffer holds its slice of each gradient, so that one reduce-scatter does a bucket.
void GradientMemory::lay_out_sections() {
  buffers_.clear();
  const int ranks = group_.world_size();
  for (const auto& members : plan_) {
    const at::Tensor& any = entries_[members[0]].parameter;
    std::int64_t section = 0;
    for (const std::size_t index : members) {
      Entry& entry = entries_[index];
      entry.offset = section;
      section += shard_of(entry.parameter.numel(), any.element_size(), 0, ranks).count;
    }
    buffers_.push_back(group_.allocate({ranks, section}, any.scalar_type()));
    buffers_.back().zero_();
  }
}

/// Undefined: zero.
void GradientMemory::put_into_sections(std::size_t index, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const Entry& entry = entries_[index];
  const at::Tensor& parameter = entry.parameter;
  at::Tensor in_order;
  if (gradient.defined()) {
    const at::IntArrayRef strides(entry.strides);
    const bool alike = gradient.strides() == strides && gradient.is_non_overlapping_and_dense();
    at::Tensor laid_out = gradient;
    if (!alike) {
      laid_out = at::empty_strided(parameter.sizes(), strides, parameter.options().requires_grad(false));
      laid_out.copy_(gradient);
    }
    in_order = laid_out.as_strided({parameter.numel()}, {1});
  }
  for (int r = 0; r < group_.world_size(); ++r) {
    const Shard shard = shard_of(parameter.numel(), parameter.element_size(), r, group_.world_size());
    const at::Tensor place = buffers_[bucket_of_[index]][r].narrow(0, entry.offset, shard.count);
    in_order.defined() ? place.copy_(in_order.narrow(0, shard.begin, shard.count)) : place.zero_();
  }
}

Work GradientMemory::start_sharded(std::size_t bucket) {
  const int ranks = group_.world_size();
  if (flat_) {
    const at::Tensor& buffer = buffers_[bucket];
    const at::Tensor section = at::empty({buffer.size(1)}, buffer.options());
    for (const std::size_t index : plan_[bucket]) {
      const at::Tensor& parameter = entries_[index].parameter;
      const Shard shard = shard_of(parameter.numel(), parameter.element_size(), group_.rank(), ranks);
      entries_[index].slice = section.narrow(0, entries_[index].offset, shard.count);
    }
    return group_.reduce_scatter_async(section, buffer, ReduceOp::kAvg);
  }
  std::vector<at::Tensor> pieces;
  std::vector<at::Tensor> slices;
  for (const std::size_t index : plan_[bucket]) {
    Entry& entry = entries_[index];
    if (ranks == 1) {
      entry.slice = entry.piece.detach().as_strided({entry.piece.numel()}, {1});
      continue;
    }
    const Shard shard = shard_of(entry.piece.numel(), entry.piece.element_size(), group_.rank(), ranks);
    entry.slice = at::empty({shard.count}, entry.piece.options().requires_grad(false));
    if (entry.piece.numel() == 0) continue;
    pieces.push_back(entry.piece);
    slices.push_back(entry.slice);
  }
  if (pieces.empty()) return {};
  return Work(own_->reduce_scatter_in_place(pieces, slices, c10d::ReduceOp::AVG));
}

at::Tensor GradientMemory::take_slice(std::size_t index) {
  Entry& entry = entries_[index];
  entry.parameter.mutable_grad().reset();
  entry.piece.reset();
  return std::exchange(entry.slice, {});
}

}  // namespace ddpkit
