#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/optim/sharded_optimizer.h>

#include "optim/optimizer_archive.h"
#include "optim/shards.h"
#include "optim/state_tensors.h"
#include "parallel/join.h"
#include "tensor/tensor_memory.h"

namespace ddpkit::optim {
namespace {

std::string bytes_without_tensors(FusedOptimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  write_without_tensors(optimizer, archive);
  return bytes_of(archive);
}

void read_without_tensors(FusedOptimizer& optimizer, const std::string& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  read_without_tensors(optimizer, archive);
}

}  // namespace

Shards& Shards::of(const ShardedOptimizerBase& optimizer) noexcept { return *optimizer.shards_; }

// ---- loss of ranks and new ranks

void Shards::make_memory() {
  std::vector<std::int64_t> numels;
  std::size_t weight_bytes = 0, state_bytes = parameters.size() * kAlignment;
  for (const NamedParameter& parameter : parameters) numels.push_back(parameter.tensor.numel());
  for (std::size_t b = 0; b < plan.size(); ++b) {
    const std::size_t size = parameters[plan[b][0]].tensor.element_size();
    const auto numel = static_cast<std::size_t>(layouts[b].shard_numel);
    memory_offsets_.push_back(weight_bytes);
    weight_bytes += numel * size;
    state_bytes += numel * std::max(size, sizeof(float));
  }
  memory = std::make_shared<ShardMemory>(group, numels, weight_bytes, state_bytes);
}

std::vector<at::Tensor> Shards::pieces_in_memory() const {
  std::vector<at::Tensor> all(parameters.size());
  for (std::size_t b = 0; b < plan.size(); ++b) {
    for (const std::size_t index : plan[b]) {
      const at::Tensor& parameter = parameters[index].tensor;
      const std::size_t offset = static_cast<std::size_t>(places[index].own.in_shard) * parameter.element_size();
      all[index] = at::from_blob(
          memory->weights(group.rank()) + memory_offsets_[b] + offset, {places[index].own.count},
          [kept = memory](void*) {}, parameter.options().requires_grad(false));
      all[index].copy_(piece_of(index));
    }
  }
  return all;
}

void Shards::begin_update() {
  states_before_.emplace();
  is_updated_.assign(pieces.size(), 0);
  const Algorithm& algorithm = FusedOptimizer::Impl::of(*inner).algorithm();
  CopyList copies;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const auto found = inner->state().find(pieces[i].unsafeGetTensorImpl());
    auto& before = states_before_->emplace_back();
    if (found != inner->state().end()) {
      const std::int64_t* const steps = algorithm.steps_of(*found->second);
      before = {.steps = steps ? *steps : 0, .tensors = algorithm.tensors_of(*found->second)};
    }
    if (!pieces[i].grad().defined()) continue;
    is_updated_[i] = 1;
    copies.add(pieces[i], piece_of(i));
  }
  copies.flush();
}

void Shards::commit() {
  for (std::size_t b = 0; b < plan.size(); ++b) {
    for (std::size_t i = 0; i < plan[b].size(); ++i) {
      const at::Tensor& parameter = parameters[plan[b][i]].tensor;
      if (!is_updated_[plan[b][i]]) continue;
      const std::size_t size = parameter.element_size();
      auto* const to = static_cast<std::byte*>(parameter.data_ptr());
      for (int r = 0; r < group.world_size(); ++r) {
        const FlatLayout::Range range = layouts[b].range(i, r);
        const std::byte* const from = memory->weights(r) + memory_offsets_[b];
        std::memcpy(to + static_cast<std::size_t>(range.in_tensor) * size,
                    from + static_cast<std::size_t>(range.in_shard) * size,
                    static_cast<std::size_t>(range.count) * size);
      }
      parameter.unsafeGetTensorImpl()->bump_version();
    }
  }
  memory->commit();
  states_before_.reset();
}

/// The values of the states are undone where they are read.
void Shards::undo_states() {
  if (!states_before_) return;
  const Algorithm& algorithm = FusedOptimizer::Impl::of(*inner).algorithm();
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const auto found = inner->state().find(pieces[i].unsafeGetTensorImpl());
    if (found == inner->state().end()) continue;
    const std::optional<StateBefore>& before = (*states_before_)[i];
    if (!before) {
      inner->state().erase(found);
      continue;
    }
    if (std::int64_t* const steps = algorithm.steps_of(*found->second)) *steps = before->steps;
    algorithm.set_tensors(*found->second, before->tensors);
  }
  states_before_.reset();
}

void Shards::regroup(const Reducer& reducer, int new_ranks) {
  const at::NoGradGuard no_grad;
  const int former = group.world_size() - new_ranks;
  const bool is_new = group.rank() >= former;
  undo_states();
  std::string settings;
  if (!is_new) {
    const auto lent = lend_groups();
    settings = bytes_without_tensors(*inner);
  }
  if (new_ranks > 0) settings = group.all_gather_bytes(group.rank() == 0 ? settings : std::string())[0];
  const auto next = std::make_shared<Shards>(reducer, group, whole_groups(), owner->defaults().clone(), factory,
                                             /*shared_weights=*/false, /*updates_in_backward=*/false);
  next->owner = owner;
  next->joinable = joinable;
  read_without_tensors(*next->inner, settings);
  ShardOutput::attach(next, reducer);
  if (new_ranks > 0) group.barrier();  // New ranks have memory for their state.
  for (int r = 0; !is_new && r < group.world_size(); ++r) {
    if (r == group.rank() || (r >= former && (r - former) % former == group.rank())) next->copy_state(r, *this);
  }
  group.barrier();
  // If a rank completes the barrier, all do. Nothing fails from here on.
  for (std::size_t g = 0; g < group_of.size(); ++g) {
    torch::optim::OptimizerParamGroup& changed = owner->param_groups()[g];
    changed.params() = std::as_const(next->groups[g]).params();
    if (is_new) changed.set_options(next->inner->param_groups()[g].options().clone());
  }
  static_cast<ShardedOptimizerBase*>(owner)->shards_ = next;
}

/// Copies the state of a rank's shards from the memory of the former ranks.
void Shards::copy_state(int rank, const Shards& from) const {
  struct Source {
    std::size_t bucket, position;
  };
  std::unordered_map<const void*, Source> source_of;
  for (std::size_t b = 0; b < from.plan.size(); ++b) {
    for (std::size_t i = 0; i < from.plan[b].size(); ++i)
      source_of[from.parameters[from.plan[b][i]].tensor.unsafeGetTensorImpl()] = {b, i};
  }
  const Algorithm& algorithm = FusedOptimizer::Impl::of(*inner).algorithm();
  for (std::size_t b = 0; b < plan.size(); ++b) {
    for (std::size_t i = 0; i < plan[b].size(); ++i) {
      const std::size_t index = plan[b][i];
      const FlatLayout::Range own = layouts[b].range(i, rank);
      const auto found = inner->state().find(pieces[index].unsafeGetTensorImpl());
      if (found == inner->state().end() || own.count == 0) continue;
      const Source& source = source_of.at(parameters[index].tensor.unsafeGetTensorImpl());
      const FlatLayout& layout = from.layouts[source.bucket];
      const Algorithm::StateTensors tensors = algorithm.tensors_of(*found->second);
      for (std::size_t k = 0; k < tensors.size(); ++k) {
        if (!tensors[k].defined()) continue;
        const std::size_t size = tensors[k].element_size();
        std::byte* const to = memory->state(rank, index, k);
        for (int r = 0; r < static_cast<int>(layout.numel / layout.shard_numel); ++r) {
          const FlatLayout::Range range = layout.range(source.position, r);
          const std::int64_t begin = std::max(own.in_tensor, range.in_tensor);
          const std::int64_t end = std::min(own.in_tensor + own.count, range.in_tensor + range.count);
          if (begin < end)
            from.memory->copy_state(r, from.plan[source.bucket][source.position], k, begin - range.in_tensor,
                                    end - begin, size, to + static_cast<std::size_t>(begin - own.in_tensor) * size);
        }
      }
    }
  }
}

// ---- join: ranks without inputs still update their shards, with the settings of the active ranks

std::vector<double> Shards::follow_active_ranks(std::vector<double> arguments) {
  JoinContext* join = joinable ? JoinContext::of(*joinable) : nullptr;
  if (!join || join->active() == group.world_size()) {
    dropped = false;
    return arguments;
  }
  const bool active = JoinContext::running(group) != nullptr;
  const auto source = static_cast<std::size_t>(join->first_active(active));
  const std::string bytes = group.all_gather_bytes(active ? settings(arguments) : std::string())[source];
  dropped = false;
  return active ? arguments : take_settings(bytes);
}

std::string Shards::settings(const std::vector<double>& arguments) const {
  torch::serialize::OutputArchive archive;
  archive.write("arguments", c10::IValue(arguments));
  // zero_grad() through a torch::optim::Optimizer& does not set `dropped`, but removes all gradients.
  const bool none =
      std::none_of(pieces.begin(), pieces.end(), [](const at::Tensor& piece) { return piece.grad().defined(); });
  archive.write("dropped", c10::IValue(dropped || none));
  for (std::size_t g = 0; g < owner->param_groups().size(); ++g) {
    torch::serialize::OutputArchive options(archive.compilation_unit());
    owner->param_groups()[g].options().serialize(options);
    archive.write(fmt::format("group{}", g), options);
  }
  return bytes_of(archive);
}

std::vector<double> Shards::take_settings(const std::string& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  for (std::size_t g = 0; g < owner->param_groups().size(); ++g) {
    torch::serialize::InputArchive options;
    archive.read(fmt::format("group{}", g), options);
    owner->param_groups()[g].options().serialize(options);
  }
  if (read_value(archive, "dropped").toBool()) drop_gradients();
  return read_value(archive, "arguments").toDoubleVector();
}

}  // namespace ddpkit::optim
