#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/serialize/archive.h>

#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "optim/shards.h"
#include "parallel/model_agreement.h"

namespace ddpkit::optim {

ShardedOptimizerBase::Groups ShardedOptimizerBase::whole_groups() const {
  check_groups();
  Groups groups;
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    std::vector<at::Tensor> parameters;
    for (const std::size_t index : shards_->group_of[g]) parameters.push_back(shards_->parameters[index].tensor);
    groups.emplace_back(parameters, param_groups_[g].options().clone());
  }
  return groups;
}

std::unique_ptr<FusedOptimizer> ShardedOptimizerBase::make_whole() const { return shards_->factory(whole_groups()); }

torch::optim::OptimizerParamState* ShardedOptimizerBase::Shards::state_of(std::size_t index) const {
  const auto found = inner->state().find(slices[index].unsafeGetTensorImpl());
  return found == inner->state().end() ? nullptr : found->second.get();
}

void ShardedOptimizerBase::consolidate_state(int to) const {
  Shards& shards = *shards_;
  const at::NoGradGuard no_grad;
  shards.consolidated.reset();
  std::unique_ptr<FusedOptimizer> whole;
  check_same_on_all_ranks(shards.group, "consolidate_state", [&] {
    if (to < 0 || to >= shards.group.world_size())
      throw InvalidArgument(fmt::format("consolidate_state to rank {} of {}", to, shards.group.world_size()));
    check_groups();
    if (shards.group.rank() == to) whole = make_whole();
    return fmt::format("to rank {}", to);
  });
  for (std::size_t i = 0; i < shards.parameters.size(); ++i) {
    const at::Tensor& parameter = shards.parameters[i].tensor;
    const auto* state = shards.state_of(i);  // On all ranks or none.
    if (!state) continue;
    FusedOptimizer::StateTensors tensors = shards.inner->tensors_of(*state);
    for (at::Tensor& tensor : tensors) {
      if (!tensor.defined()) continue;
      const at::Tensor padded = at::zeros({shard_on(parameter, shards.group, 0).count}, tensor.options());
      padded.narrow(0, 0, tensor.numel()).copy_(tensor);
      const at::Tensor gathered = shards.group.gather(padded, to);  // [world_size, count]: only the end is padding.
      if (!whole) continue;
      const at::Tensor laid_out = at::empty_strided(shards.places[i].sizes, shards.places[i].strides, tensor.options());
      in_order(laid_out).copy_(gathered.flatten().narrow(0, 0, parameter.numel()));
      tensor = laid_out;
    }
    if (!whole) continue;
    auto copy = state->clone();
    shards.inner->set_tensors(*copy, tensors);
    whole->state()[parameter.unsafeGetTensorImpl()] = std::move(copy);
  }
  shards.consolidated = std::move(whole);
}

const FusedOptimizer& ShardedOptimizerBase::consolidated() const {
  const Shards& shards = *shards_;
  if (!shards.consolidated)
    throw InvalidArgument(fmt::format(
        "rank {} has only its part of the optimizer's state: call consolidate_state() on all ranks first, and save on "
        "the rank it names",
        shards.group.rank()));
  return *shards.consolidated;
}

void ShardedOptimizerBase::save(torch::serialize::OutputArchive& archive) const { consolidated().save(archive); }

void ShardedOptimizerBase::load(torch::serialize::InputArchive& archive) {
  const auto whole = make_whole();
  whole->load(archive);
  take_state(*whole);
}

void ShardedOptimizerBase::take_state(const FusedOptimizer& whole) {
  const at::NoGradGuard no_grad;
  Shards& shards = *shards_;
  shards.consolidated.reset();
  check_groups();
  auto& groups = shards.inner->param_groups();
  const LentGroups lent(param_groups_, groups);
  shards.inner->replace_state([&] {
    for (std::size_t g = 0; g < groups.size(); ++g) groups[g].set_options(whole.param_groups()[g].options().clone());
    for (std::size_t i = 0; i < shards.parameters.size(); ++i) {
      const at::Tensor& parameter = shards.parameters[i].tensor;
      const auto found = whole.state().find(parameter.unsafeGetTensorImpl());
      if (found == whole.state().end()) continue;
      const Shard shard = shard_on(parameter, shards.group, shards.group.rank());
      FusedOptimizer::StateTensors tensors = whole.tensors_of(*found->second);
      for (at::Tensor& tensor : tensors) {
        if (!tensor.defined()) continue;
        const at::Tensor laid_out =
            at::empty_strided(shards.places[i].sizes, shards.places[i].strides, tensor.options());
        laid_out.copy_(tensor);
        tensor = in_order(laid_out).narrow(0, shard.begin, shard.count).clone();
      }
      auto copy = found->second->clone();
      shards.inner->set_tensors(*copy, tensors);
      shards.inner->state()[shards.slices[i].unsafeGetTensorImpl()] = std::move(copy);
    }
  });
}

}  // namespace ddpkit::optim
