#include "optim/shards.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/clip_grad_norm.h>

#include "parallel/model_agreement.h"
#include "tensor/tensor_memory.h"

namespace ddpkit::optim {
namespace {

/// Names two parameters that share part of their memory; empty if there are none. `may_be_same` allows two names of one
/// weight, which share all memory.
std::string find_overlap(const std::vector<NamedParameter>& parameters, bool may_be_same) {
  std::vector<const NamedParameter*> sorted;
  for (const NamedParameter& parameter : parameters) {
    if (parameter.tensor.numel() != 0) sorted.push_back(&parameter);
  }
  const auto begin = [](const NamedParameter* one) { return static_cast<const char*>(one->tensor.const_data_ptr()); };
  std::sort(sorted.begin(), sorted.end(), [&](const auto* a, const auto* b) { return begin(a) < begin(b); });
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    const NamedParameter &a = *sorted[i - 1], &b = *sorted[i];
    if (begin(&b) >= begin(&a) + a.tensor.nbytes()) continue;
    const bool same = begin(&a) == begin(&b) && a.tensor.nbytes() == b.tensor.nbytes() &&
                      a.tensor.scalar_type() == b.tensor.scalar_type();
    if (!same || !may_be_same)
      return fmt::format("parameters {} and {} overlap in memory: register one of them, or give each its own memory",
                         a.name, b.name);
  }
  return {};
}

}  // namespace

Shards::Shards(const Reducer& reducer, ProcessGroup process_group, const Groups& whole_groups,
               std::unique_ptr<torch::optim::OptimizerOptions> default_options, Factory make, bool shared_weights,
               bool updates_in_backward)
    : group(std::move(process_group)),
      update_in_backward(updates_in_backward),
      factory(std::move(make)),
      parameters(parameters_of(reducer)),
      defaults(std::move(default_options)),
      sharded(parameter_shards_of(reducer)) {
  const at::NoGradGuard no_grad;
  make_plan(reducer);
  check_same_on_all_ranks(group, "ShardedOptimizer", [&] {
    if (const std::string error = find_error(whole_groups, shared_weights); !error.empty())
      throw InvalidArgument("ShardedOptimizer: " + error);
    return signature(shared_weights);
  });
  if (shared_weights && group.world_size() > 1) weights = std::make_unique<SharedWeights>(parameters, group);
  if (can_survive_loss(shared_weights)) make_memory();
  cut(whole_groups);
  inner = factory(groups);
  if (!memory) return;
  memory->set_pieces(pieces);
  FusedOptimizer::Impl::of(*inner).use_memory(*memory);
}

/// Also sets `group_of`.
std::string Shards::find_error(const Groups& whole_groups, bool shared_weights) {
  std::unordered_map<const void*, std::size_t> index_of;
  for (std::size_t i = 0; i < parameters.size(); ++i) index_of[parameters[i].tensor.unsafeGetTensorImpl()] = i;
  for (std::size_t g = 0; g < whole_groups.size(); ++g) {
    group_of.emplace_back();
    for (const at::Tensor& parameter : distinct_parameters(whole_groups[g].params())) {
      const auto found = index_of.find(parameter.unsafeGetTensorImpl());
      if (found == index_of.end())
        return fmt::format(
            "a tensor [{}] of parameter group {} is none of the parameters that DistributedDataParallel averages, or "
            "is in the groups twice",
            fmt::join(parameter.sizes(), ", "), g);
      group_of.back().push_back(found->second);
      index_of.erase(found);
    }
  }
  if (!index_of.empty())
    return fmt::format(
        "parameter {} is in no parameter group: it would never change. The groups need all parameters "
        "that wanted a gradient when the model was wrapped, also those that were frozen later",
        parameters[index_of.begin()->second].name);
  if (shared_weights && group.world_size() > 1 && !SharedWeights::possible(group))
    return fmt::format("shared_weights needs the shm backend on one host; this group has {} on {}",
                       group.backend_name(), group.device().str());
  if (sharded && (shared_weights || update_in_backward))
    return fmt::format("{} does not support the sharded weights of FullyShardedDataParallel",
                       shared_weights ? "shared_weights" : "update_in_backward");
  if (sharded) return {};
  for (const NamedParameter& parameter : parameters) {
    if (!parameter.tensor.is_non_overlapping_and_dense())
      return fmt::format("parameter {} is not dense in memory: it cannot be sharded (make it contiguous)",
                         parameter.name);
  }
  return find_overlap(parameters, !update_in_backward);
}

/// Returns, in lines, the properties that must be equal on all ranks.
std::string Shards::signature(bool shared_weights) const {
  std::string text = fmt::format("shared_weights {}, update_in_backward {}, survives the loss of a rank {}\n",
                                 shared_weights, update_in_backward, can_survive_loss(shared_weights));
  for (std::size_t g = 0; g < group_of.size(); ++g) {
    for (const std::size_t index : group_of[g])
      text += fmt::format("parameter {} in group {} with strides [{}]\n", parameters[index].name, g,
                          fmt::join(parameters[index].tensor.strides(), ", "));
  }
  return text;
}

/// Parameters that share memory are updated one after the other, but their pieces in ShardMemory would not be.
bool Shards::can_survive_loss(bool shared_weights) const {
  return !shared_weights && !update_in_backward && !sharded && ShardMemory::possible(group) &&
         find_overlap(parameters, /*may_be_same=*/false).empty();
}

void Shards::cut(const Groups& whole_groups) {
  places.resize(parameters.size());
  for (std::size_t b = 0; b < plan.size(); ++b) {
    for (std::size_t i = 0; i < plan[b].size(); ++i) places[plan[b][i]].own = layouts[b].range(i, group.rank());
  }
  if (memory) pieces = pieces_in_memory();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i].tensor;
    places[i].sizes = parameter.sizes().vec();
    places[i].strides = parameter.strides().vec();
    if (sharded) {
      pieces.push_back(sharded->piece(parameter));
      continue;
    }
    places[i].data = parameter.const_data_ptr();
    if (memory) continue;
    const FlatLayout::Range& own = places[i].own;
    pieces.push_back(weights ? weights->piece(i, own.in_tensor, own.count) : piece_of(i));
  }
  for (std::size_t g = 0; g < whole_groups.size(); ++g) {
    std::vector<at::Tensor> members;
    for (const std::size_t index : group_of[g]) members.push_back(pieces[index]);
    groups.emplace_back(members, whole_groups[g].has_options() ? whole_groups[g].options().clone() : defaults->clone());
  }
}

/// Without shared weights.
at::Tensor Shards::piece_of(std::size_t index) const {
  return in_order(parameters[index].tensor).narrow(0, places[index].own.in_tensor, places[index].own.count);
}

void Shards::gather_weights() const {
  if (group.world_size() == 1 || sharded) return;
  for (std::size_t b = 0; b < plan.size(); ++b) {
    const FlatLayout& layout = layouts[b];
    const at::TensorOptions kind = pieces[plan[b][0]].options();
    const at::Tensor shard = at::empty({layout.shard_numel}, kind);
    const at::Tensor flat = at::empty({layout.numel}, kind);
    CopyList copies;
    for (const std::size_t index : plan[b])
      copies.add(shard.narrow(0, places[index].own.in_shard, places[index].own.count), pieces[index]);
    copies.flush();
    group.all_gather_into(flat.view({group.world_size(), layout.shard_numel}), shard);
    for (std::size_t i = 0; i < plan[b].size(); ++i) {
      const at::Tensor to = in_order(parameters[plan[b][i]].tensor);
      const at::Tensor from = flat.narrow(0, layout.offsets[i], layout.numels[i]);
      const auto copy = [&](std::int64_t begin, std::int64_t end) {
        if (begin != end) copies.add(to.narrow(0, begin, end - begin), from.narrow(0, begin, end - begin));
      };
      const FlatLayout::Range& own = places[plan[b][i]].own;
      copy(0, own.in_tensor);
      copy(own.in_tensor + own.count, layout.numels[i]);
    }
    copies.flush();
  }
}

void Shards::follow_parameters() {
  if (sharded) return sharded->adopt();
  const at::NoGradGuard no_grad;
  try {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& parameter = parameters[i].tensor;
      if (parameter.const_data_ptr() != places[i].data || parameter.strides() != at::IntArrayRef(places[i].strides))
        follow_parameter(i);
    }
  } catch (const std::exception& error) {
    group.abort(error.what());  // Parameters of other ranks may not be updated.
    throw;
  }
}

/// torch::load() and set_data() give parameters new memory. Copies its values.
void Shards::follow_parameter(std::size_t index) {
  at::Tensor& parameter = parameters[index].tensor;
  at::Tensor& piece = pieces[index];
  Place& place = places[index];
  if (parameter.scalar_type() != piece.scalar_type() || parameter.device() != piece.device() ||
      parameter.sizes() != at::IntArrayRef(place.sizes))
    throw InvalidArgument(fmt::format(
        "parameter {} has become a {} tensor [{}] on {} since the ShardedOptimizer was made, where it was {} [{}] on "
        "{}: move, convert or resize the model before that",
        parameters[index].name, c10::toString(parameter.scalar_type()), fmt::join(parameter.sizes(), ", "),
        parameter.device().str(), c10::toString(piece.scalar_type()), fmt::join(place.sizes, ", "),
        piece.device().str()));
  if (parameter.strides() != at::IntArrayRef(place.strides)) {
    // State and pieces have the element order of the parameter's memory when it was sharded.
    if (parameter.storage().nbytes() != parameter.nbytes() || parameter.storage().use_count() > 1)
      throw InvalidArgument(fmt::format(
          "parameter {} is not dense in memory any more, or shares it with another tensor, and its strides have become "
          "[{}] since the ShardedOptimizer was made, where they were [{}]: change layouts before that",
          parameters[index].name, fmt::join(parameter.strides(), ", "), fmt::join(place.strides, ", ")));
    parameter.set_data(place.empty(parameter.options().requires_grad(false)).copy_(parameter));
  }
  if (weights) {
    weights->adopt(index);
  } else if (!memory) {
    piece.set_data(piece_of(index));
  }
  place.data = parameter.const_data_ptr();
}

void Shards::check_groups() const {
  const auto& expected = std::as_const(*inner).param_groups();
  bool same = owner->param_groups().size() == expected.size();
  for (std::size_t g = 0; same && g < expected.size(); ++g) {
    const auto &now = owner->param_groups()[g].params(), &before = expected[g].params();
    same = std::equal(now.begin(), now.end(), before.begin(), before.end(),
                      [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); });
  }
  if (!same)
    throw InvalidArgument(
        fmt::format("ShardedOptimizer: its parameter groups have changed ({} groups now, {} when it was made), but are "
                    "fixed: do not call add_param_group(); wrap the model again and make a new optimizer",
                    owner->param_groups().size(), expected.size()));
}

void Shards::update(double factor) {
  check_groups();
  if (sharded) sharded->before_update();
  {
    const auto lent = lend_groups();
    inner->step_scaled(factor);
  }
  if (sharded) sharded->after_update();
  if (memory) return;
  // Pieces have separate version counters, but autograd saved the parameter.
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].grad().defined()) parameters[i].tensor.unsafeGetTensorImpl()->bump_version();
  }
}

void Shards::drop_gradients() {
  for (at::Tensor& piece : pieces) piece.mutable_grad().reset();
}

void Shards::before_first() {
  follow_active_ranks();
  if (!update_in_backward) return;
  follow_parameters();
  if (weights) weights->synchronize();
}

void Shards::receive(std::size_t bucket, at::Tensor shard, const std::vector<std::uint8_t>& used) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (!used[i]) continue;
    const std::size_t index = plan[bucket][i];
    const at::Tensor added = shard.narrow(0, places[index].own.in_shard, places[index].own.count)
                                 .to(pieces[index].scalar_type());  // Gradients may be averaged in another type.
    at::Tensor& gradient = pieces[index].mutable_grad();
    if (gradient.defined()) {
      gradient.add_(added);
    } else {
      // detach() removes the view: zero_grad() of torch::optim::Optimizer detaches the gradient in place.
      gradient = added.detach();
    }
  }
  if (!update_in_backward) return;
  update(1);
  for (const std::size_t index : plan[bucket]) pieces[index].mutable_grad().reset();
}

at::Tensor Shards::Place::empty(const at::TensorOptions& kind) const { return at::empty_strided(sizes, strides, kind); }

/// Returns the groups of whole parameters with the owner's options.
Shards::Groups Shards::whole_groups() const {
  check_groups();
  Groups whole;
  for (std::size_t g = 0; g < group_of.size(); ++g) {
    std::vector<at::Tensor> members;
    for (const std::size_t index : group_of[g]) members.push_back(parameters[index].tensor);
    whole.emplace_back(members, owner->param_groups()[g].options().clone());
  }
  return whole;
}

std::unique_ptr<FusedOptimizer> Shards::make_whole() const {
  const Groups all = whole_groups();
  auto whole = factory(all);
  // The constructor of LibTorch 2.15 replaces options that are defaults of their type.
  for (std::size_t g = 0; g < all.size(); ++g) whole->param_groups()[g].set_options(all[g].options().clone());
  return whole;
}

void Shards::gather_state(FusedOptimizer* whole, int to) const {
  const Algorithm& algorithm = FusedOptimizer::Impl::of(*inner).algorithm();
  for (std::size_t b = 0; b < plan.size(); ++b) {
    const auto& members = plan[b];
    // All ranks have state of the same parameters, and tensors of the same kinds.
    std::vector<const torch::optim::OptimizerParamState*> states;  // Null: no state. [position]
    Algorithm::StateTensors flat;                                  // This rank's shard, then the whole. [kind]
    for (const std::size_t index : members) {
      const auto found = inner->state().find(pieces[index].unsafeGetTensorImpl());
      states.push_back(found == inner->state().end() ? nullptr : found->second.get());
      if (!states.back()) continue;
      const Algorithm::StateTensors tensors = algorithm.tensors_of(*states.back());
      const FlatLayout::Range& own = places[index].own;
      for (std::size_t k = 0; k < tensors.size(); ++k) {
        if (!tensors[k].defined()) continue;
        if (!flat[k].defined()) flat[k] = at::zeros({layouts[b].shard_numel}, tensors[k].options());
        flat[k].narrow(0, own.in_shard, own.count).copy_(tensors[k]);
      }
    }
    for (at::Tensor& tensor : flat) {
      if (tensor.defined()) tensor = group.gather(tensor, to);
    }
    for (std::size_t i = 0; whole && i < members.size(); ++i) {
      if (!states[i]) continue;
      Algorithm::StateTensors tensors = algorithm.tensors_of(*states[i]);
      for (std::size_t k = 0; k < tensors.size(); ++k) {
        if (!tensors[k].defined()) continue;
        tensors[k] = places[members[i]].empty(tensors[k].options());
        in_order(tensors[k]).copy_(flat[k].flatten().narrow(0, layouts[b].offsets[i], layouts[b].numels[i]));
      }
      auto copy = states[i]->clone();
      algorithm.set_tensors(*copy, tensors);
      whole->state()[parameters[members[i]].tensor.unsafeGetTensorImpl()] = std::move(copy);
    }
  }
}

void Shards::take_state(const FusedOptimizer& whole) {
  const at::NoGradGuard no_grad;
  check_groups();
  consolidated.reset();
  const Algorithm& algorithm = FusedOptimizer::Impl::of(*inner).algorithm();
  const auto note_replacement = [this] {
    if (memory) memory->note_replacement();
  };
  note_replacement();
  const auto at_end = c10::make_scope_exit(note_replacement);
  auto& own_groups = inner->param_groups();
  const auto lent = lend_groups();
  FusedOptimizer::Impl::of(*inner).replace_state([&] {
    for (std::size_t g = 0; g < own_groups.size(); ++g)
      own_groups[g].set_options(whole.param_groups()[g].options().clone());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto found = whole.state().find(parameters[i].tensor.unsafeGetTensorImpl());
      if (found == whole.state().end()) continue;
      Algorithm::StateTensors tensors = algorithm.tensors_of(*found->second);
      for (at::Tensor& tensor : tensors) {
        if (!tensor.defined()) continue;
        const at::Tensor laid_out = places[i].empty(tensor.options());
        laid_out.copy_(tensor);
        tensor = in_order(laid_out).narrow(0, places[i].own.in_tensor, places[i].own.count).clone();
      }
      auto copy = found->second->clone();
      algorithm.set_tensors(*copy, tensors);
      inner->state()[pieces[i].unsafeGetTensorImpl()] = std::move(copy);
    }
  });
}

}  // namespace ddpkit::optim
