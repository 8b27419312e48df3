#include <ddpkit/optim/sharded_optimizer.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/serialize/archive.h>

#include <cmath>
#include <limits>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/comm/error.h>

#include "optim/shared_weights.h"
#include "parallel/join_session.h"
#include "parallel/shard.h"

namespace ddpkit::optim {
namespace {

/// Weights are gathered in messages of about this many bytes.
constexpr std::int64_t kMessageBytes = std::int64_t{32} << 20;

/// A dense tensor's elements in the order of their memory.
at::Tensor in_order(const at::Tensor& tensor) { return tensor.detach().as_strided({tensor.numel()}, {1}); }

Shard shard_on(const at::Tensor& tensor, const ProcessGroup& group, int rank) {
  return shard_of(tensor.numel(), tensor.element_size(), rank, group.world_size());
}

}  // namespace

/// The parameters, and this rank's slice of each.
struct ShardedOptimizerBase::Slices {
  std::vector<NamedParameter> parameters;          ///< [param], as the reducer counts them.
  std::vector<const void*> places;                 ///< Where each parameter's memory began. [param]
  std::vector<at::Tensor> slices;                  ///< [param]
  std::vector<std::vector<std::size_t>> group_of;  ///< Parameters of each group. [group][position]
  Groups groups;                                   ///< The slices', with the options of the parameters'.
  std::unique_ptr<torch::optim::OptimizerOptions> defaults;
  std::unique_ptr<SharedWeights> weights;
};

std::vector<at::Tensor> ShardedOptimizerBase::parameters_of(const DistributedDataParallelBase& ddp) {
  std::vector<at::Tensor> tensors;
  for (const NamedParameter& parameter : ddp.reducer().parameters()) tensors.push_back(parameter.tensor);
  return tensors;
}

std::unique_ptr<ShardedOptimizerBase::Slices> ShardedOptimizerBase::cut(
    DistributedDataParallelBase& ddp, const Groups& groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults,
    const ShardedOptions& options) {
  const at::NoGradGuard no_grad;
  const ProcessGroup& group = ddp.group();
  auto cut = std::make_unique<Slices>();
  cut->parameters = ddp.reducer().parameters();
  std::unordered_map<const void*, std::size_t> index_of;
  for (std::size_t i = 0; i < cut->parameters.size(); ++i)
    index_of[cut->parameters[i].tensor.unsafeGetTensorImpl()] = i;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    cut->group_of.emplace_back();
    for (const at::Tensor& parameter : groups[g].params()) {
      const auto found = index_of.find(parameter.unsafeGetTensorImpl());
      if (found == index_of.end())
        throw InvalidArgument(
            fmt::format("ShardedOptimizer: a tensor [{}] of parameter group {} is none of the parameters that "
                        "DistributedDataParallel averages, or is in the groups twice",
                        fmt::join(parameter.sizes(), ", "), g));
      cut->group_of.back().push_back(found->second);
      index_of.erase(found);
    }
  }
  if (!index_of.empty())
    throw InvalidArgument(fmt::format("ShardedOptimizer: parameter {} is in no parameter group: it would never change",
                                      cut->parameters[index_of.begin()->second].name));
  if (options.shared_weights.value_or(false) && !SharedWeights::possible(group))
    throw InvalidArgument(fmt::format(
        "ShardedOptimizer: shared_weights needs the shm backend and at least two ranks; this group has {} and {}",
        group.backend_name(), group.world_size()));

  if (options.shared_weights.value_or(SharedWeights::possible(group)))
    cut->weights = std::make_unique<SharedWeights>(cut->parameters, group);
  for (std::size_t i = 0; i < cut->parameters.size(); ++i) {
    const at::Tensor& parameter = cut->parameters[i].tensor;
    cut->places.push_back(parameter.const_data_ptr());
    const Shard shard = shard_on(parameter, group, group.rank());
    cut->slices.push_back(cut->weights ? cut->weights->slice(i, shard)
                                       : in_order(parameter).narrow(0, shard.begin, shard.count));
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    std::vector<at::Tensor> slices;
    for (const std::size_t index : cut->group_of[g]) slices.push_back(cut->slices[index]);
    cut->groups.emplace_back(slices, groups[g].has_options() ? groups[g].options().clone() : defaults->clone());
  }
  cut->defaults = std::move(defaults);
  return cut;
}

ShardedOptimizerBase::ShardedOptimizerBase(DistributedDataParallelBase& ddp, const Groups& groups,
                                           std::unique_ptr<torch::optim::OptimizerOptions> defaults, Factory factory,
                                           const ShardedOptions& options)
    : ShardedOptimizerBase(ddp, cut(ddp, groups, std::move(defaults), options), std::move(factory), options) {}

ShardedOptimizerBase::ShardedOptimizerBase(DistributedDataParallelBase& ddp, std::unique_ptr<Slices> slices,
                                           Factory factory, const ShardedOptions& options)
    : torch::optim::Optimizer(slices->groups, std::move(slices->defaults)),
      group_(ddp.group()),
      reducer_(&ddp.reducer()),
      options_(options),
      factory_(std::move(factory)),
      slices_(std::move(slices)),
      weights_(std::move(slices_->weights)),
      inner_(factory_(slices_->groups)) {
  reducer_->set_gradient_sink(this);
}

ShardedOptimizerBase::~ShardedOptimizerBase() {
  try {
    reducer_->set_gradient_sink(nullptr);
  } catch (const Error&) {
    // Within a backward that ended with an error: there will be no other.
  }
}

void ShardedOptimizerBase::begin() {
  if (!options_.update_in_backward) return;
  follow_parameters();
  if (weights_) weights_->settle();
}

void ShardedOptimizerBase::receive(const std::vector<std::size_t>& parameters, std::vector<at::Tensor> slices) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor& gradient = slices_->slices[parameters[i]].mutable_grad();
    if (gradient.defined()) {
      gradient.add_(slices[i]);
    } else {
      gradient = std::move(slices[i]);
    }
  }
  if (!options_.update_in_backward) return;
  update();
  for (const std::size_t index : parameters) slices_->slices[index].mutable_grad().reset();
}

void ShardedOptimizerBase::update() {
  for (std::size_t g = 0; g < param_groups_.size(); ++g)
    inner_->param_groups()[g].set_options(param_groups_[g].options().clone());
  inner_->step();
}

at::Tensor ShardedOptimizerBase::step(LossClosure closure) {
  if (closure)
    throw InvalidArgument("ShardedOptimizer takes no closure: call loss.backward() first and step() after it");
  if (join_) join_->announce(join_index_, 0);
  step_together();
  return {};
}

void ShardedOptimizerBase::step_together() {
  const at::NoGradGuard no_grad;
  consolidated_.reset();
  try {
    follow_parameters();
    if (options_.update_in_backward) {
      if (weights_ && weights_->is_written())
        throw InvalidArgument(
            "a parameter has been written to between backward and step(): with update_in_backward it is being updated "
            "there; write to it after step()");
    } else {
      // From here on nobody reads the weights, and all have the same.
      if (weights_) weights_->settle();
      inner_->scale_gradients(std::exchange(gradient_factor_, 1.0));
      update();
      for (at::Tensor& slice : slices_->slices) slice.mutable_grad().reset();
    }
  } catch (const std::exception& error) {
    group_.abort(error.what());
    throw;
  }
  if (weights_) {
    group_.barrier();
  } else {
    gather_weights();
  }
}

void ShardedOptimizerBase::gather_weights() {
  const int ranks = group_.world_size();
  if (ranks == 1) return;
  const auto& parameters = slices_->parameters;
  for (std::size_t begin = 0; begin < parameters.size();) {
    // As many parameters of one type as fill a message.
    const at::TensorOptions kind = parameters[begin].tensor.options().requires_grad(false);
    std::vector<std::int64_t> offsets;
    std::int64_t section = 0;
    std::size_t end = begin;
    for (; end < parameters.size(); ++end) {
      const at::Tensor& parameter = parameters[end].tensor;
      if (parameter.scalar_type() != c10::typeMetaToScalarType(kind.dtype()) ||
          (end > begin && section * ranks * parameter.element_size() > kMessageBytes))
        break;
      offsets.push_back(section);
      section += shard_on(parameter, group_, 0).count;
    }
    const at::Tensor own = at::empty({section}, kind);
    const at::Tensor all = at::empty({ranks, section}, kind);
    for (std::size_t i = begin; i < end; ++i)
      own.narrow(0, offsets[i - begin], slices_->slices[i].numel()).copy_(slices_->slices[i]);
    group_.all_gather_into(all, own);
    for (std::size_t i = begin; i < end; ++i) {
      const at::Tensor& parameter = parameters[i].tensor;
      const at::Tensor whole = in_order(parameter);
      for (int r = 0; r < ranks; ++r) {
        const Shard shard = shard_on(parameter, group_, r);
        if (r != group_.rank() && shard.count != 0)
          whole.narrow(0, shard.begin, shard.count).copy_(all[r].narrow(0, offsets[i - begin], shard.count));
      }
    }
    begin = end;
  }
}

/// torch::load() gives parameters memory of their own: what it holds is taken over.
void ShardedOptimizerBase::follow_parameters() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < slices_->parameters.size(); ++i) {
    at::Tensor& parameter = slices_->parameters[i].tensor;
    if (parameter.const_data_ptr() == slices_->places[i]) continue;
    at::Tensor& slice = slices_->slices[i];
    if (parameter.scalar_type() != slice.scalar_type() || parameter.device() != slice.device() ||
        !parameter.is_non_overlapping_and_dense())
      throw InvalidArgument(
          fmt::format("parameter {} has become a {} tensor on {} since the ShardedOptimizer was made: move or convert "
                      "the model before that",
                      slices_->parameters[i].name, c10::toString(parameter.scalar_type()), parameter.device().str()));
    if (weights_) {
      weights_->take_back(i);
    } else {
      const Shard shard = shard_on(parameter, group_, group_.rank());
      slice.set_data(in_order(parameter).narrow(0, shard.begin, shard.count));
    }
    slices_->places[i] = parameter.const_data_ptr();
  }
}

void ShardedOptimizerBase::zero_grad(bool set_to_none) {
  // Not torch::optim's, which detaches gradients in place: a slice's may be a view.
  const at::NoGradGuard no_grad;
  for (at::Tensor& slice : slices_->slices) {
    at::Tensor& gradient = slice.mutable_grad();
    if (gradient.defined() && !set_to_none) gradient.zero_();
    if (set_to_none) gradient.reset();
  }
  for (NamedParameter& parameter : slices_->parameters) parameter.tensor.mutable_grad().reset();
  reset_scale();
}

void ShardedOptimizerBase::scale_gradients(double factor) {
  if (options_.update_in_backward)
    throw InvalidArgument(
        "gradients cannot be scaled or clipped after backward where update_in_backward has used them up there: make "
        "the ShardedOptimizer without it");
  gradient_factor_ *= factor;
}

double ShardedOptimizerBase::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  scale_gradients(1);  // Throws where that is impossible.
  const double own = grad_norm(slices_->slices, norm_type);
  const bool largest = std::isinf(norm_type);
  const at::Tensor sum =
      at::full({1}, largest ? own : std::pow(own, norm_type), at::TensorOptions(at::kDouble).device(group_.device()));
  group_.all_reduce(sum, largest ? ReduceOp::kMax : ReduceOp::kSum);
  const double together = sum.item<double>();
  const double norm = (largest ? together : std::pow(together, 1 / norm_type)) * std::abs(gradient_factor_);
  scale_gradients(clip_factor(norm, max_norm, norm_type, error_if_nonfinite));
  return norm;
}

ShardedOptimizerBase::Groups ShardedOptimizerBase::whole_groups() const {
  Groups groups;
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    std::vector<at::Tensor> parameters;
    for (const std::size_t index : slices_->group_of[g]) parameters.push_back(slices_->parameters[index].tensor);
    groups.emplace_back(parameters, param_groups_[g].options().clone());
  }
  return groups;
}

torch::optim::OptimizerParamState* ShardedOptimizerBase::state_of(std::size_t index) const {
  const auto found = inner_->state().find(slices_->slices[index].unsafeGetTensorImpl());
  return found == inner_->state().end() ? nullptr : found->second.get();
}

void ShardedOptimizerBase::consolidate_state(int to) const {
  if (to < 0 || to >= group_.world_size())
    throw InvalidArgument(fmt::format("consolidate_state to rank {} of {}", to, group_.world_size()));
  const at::NoGradGuard no_grad;
  consolidated_.reset();
  auto whole = group_.rank() == to ? factory_(whole_groups()) : nullptr;
  for (std::size_t i = 0; i < slices_->parameters.size(); ++i) {
    const at::Tensor& parameter = slices_->parameters[i].tensor;
    const auto* state = state_of(i);  // On all ranks or none.
    if (!state) continue;
    FusedOptimizer::StateTensors tensors = inner_->tensors_of(*state);
    for (at::Tensor& tensor : tensors) {
      if (!tensor.defined()) continue;
      const at::Tensor padded = at::zeros({shard_on(parameter, group_, 0).count}, tensor.options());
      padded.narrow(0, 0, tensor.numel()).copy_(tensor);
      const at::Tensor gathered = group_.gather(padded, to);  // [world_size, count]: only the end is padding.
      if (!whole) continue;
      const at::Tensor laid_out = at::empty_strided(parameter.sizes(), parameter.strides(), tensor.options());
      in_order(laid_out).copy_(gathered.flatten().narrow(0, 0, parameter.numel()));
      tensor = laid_out;
    }
    if (!whole) continue;
    auto copy = state->clone();
    inner_->set_tensors(*copy, tensors);
    whole->state()[parameter.unsafeGetTensorImpl()] = std::move(copy);
  }
  consolidated_ = std::move(whole);
}

const FusedOptimizer& ShardedOptimizerBase::consolidated() const {
  if (!consolidated_)
    throw InvalidArgument(fmt::format(
        "rank {} has only its part of the optimizer's state: call consolidate_state() on all ranks first, and save on "
        "the rank it names",
        group_.rank()));
  return *consolidated_;
}

void ShardedOptimizerBase::save(torch::serialize::OutputArchive& archive) const { consolidated().save(archive); }

void ShardedOptimizerBase::load(torch::serialize::InputArchive& archive) {
  const auto whole = make_whole();
  whole->load(archive);
  take_state(*whole);
}

void ShardedOptimizerBase::take_state(const FusedOptimizer& whole) {
  const at::NoGradGuard no_grad;
  consolidated_.reset();
  inner_->state().clear();
  for (std::size_t g = 0; g < param_groups_.size(); ++g)
    param_groups_[g].set_options(whole.param_groups()[g].options().clone());
  for (std::size_t i = 0; i < slices_->parameters.size(); ++i) {
    const at::Tensor& parameter = slices_->parameters[i].tensor;
    const auto found = whole.state().find(parameter.unsafeGetTensorImpl());
    if (found == whole.state().end()) continue;
    const Shard shard = shard_on(parameter, group_, group_.rank());
    FusedOptimizer::StateTensors tensors = whole.tensors_of(*found->second);
    for (at::Tensor& tensor : tensors) {
      if (!tensor.defined()) continue;
      const at::Tensor laid_out = at::empty_strided(parameter.sizes(), parameter.strides(), tensor.options());
      laid_out.copy_(tensor);
      tensor = in_order(laid_out).narrow(0, shard.begin, shard.count).clone();
    }
    auto copy = found->second->clone();
    inner_->set_tensors(*copy, tensors);
    inner_->state()[slices_->slices[i].unsafeGetTensorImpl()] = std::move(copy);
  }
}

void ShardedOptimizerBase::join_begin(JoinSession& session, int index) {
  join_ = &session;
  join_index_ = index;
}

void ShardedOptimizerBase::join_shadow(int) { step_together(); }

void ShardedOptimizerBase::join_end(int) { join_ = nullptr; }

}  // namespace ddpkit::optim
