#include <ddpkit/optim/sharded_optimizer.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "optim/shards.h"

namespace ddpkit::optim {

std::vector<at::Tensor> ShardedOptimizerBase::parameters_of(const DistributedDataParallelBase& ddp) {
  std::vector<at::Tensor> tensors;
  for (const NamedParameter& parameter : ddp.reducer().parameters()) tensors.push_back(parameter.tensor);
  return tensors;
}

ShardedOptimizerBase::ShardedOptimizerBase(DistributedDataParallelBase& ddp, const Groups& groups,
                                           std::unique_ptr<torch::optim::OptimizerOptions> defaults, Factory factory,
                                           const ShardedOptions& options)
    : ShardedOptimizerBase(std::make_unique<Shards>(ddp, groups, std::move(defaults), std::move(factory), options)) {}

ShardedOptimizerBase::ShardedOptimizerBase(std::unique_ptr<Shards> shards)
    : torch::optim::Optimizer(shards->groups, std::move(shards->defaults)), shards_(std::move(shards)) {
  shards_->owner = this;
}

ShardedOptimizerBase::~ShardedOptimizerBase() = default;

ShardedOptimizerBase::ShardedOptimizerBase(ShardedOptimizerBase&& other) noexcept
    : torch::optim::Optimizer(std::move(other)), shards_(std::move(other.shards_)) {
  shards_->owner = this;
}

ShardedOptimizerBase& ShardedOptimizerBase::operator=(ShardedOptimizerBase&& other) noexcept {
  torch::optim::Optimizer::operator=(std::move(other));
  shards_ = std::move(other.shards_);
  shards_->owner = this;
  return *this;
}

const FusedOptimizer& ShardedOptimizerBase::inner() const noexcept { return *shards_->inner; }

bool ShardedOptimizerBase::has_shared_weights() const noexcept { return shards_->weights != nullptr; }

void ShardedOptimizerBase::Shards::begin() {
  owner->follow_active_ranks();
  if (!options.update_in_backward) return;
  follow_parameters();
  if (weights) weights->settle();
}

void ShardedOptimizerBase::Shards::receive(const std::vector<std::size_t>& received,
                                           std::vector<at::Tensor> gradients) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < received.size(); ++i) {
    at::Tensor& gradient = slices[received[i]].mutable_grad();
    if (gradient.defined()) {
      gradient.add_(gradients[i]);
    } else {
      // No view: zero_grad() of torch::optim::Optimizer detaches it in place.
      gradient = gradients[i].detach();
    }
  }
  if (!options.update_in_backward) return;
  owner->update(1);
  for (const std::size_t index : received) slices[index].mutable_grad().reset();
}

void ShardedOptimizerBase::check_groups() const {
  const auto& expected = std::as_const(*shards_->inner).param_groups();
  bool same = param_groups_.size() == expected.size();
  for (std::size_t g = 0; same && g < expected.size(); ++g) {
    const auto &now = param_groups_[g].params(), &before = expected[g].params();
    same = std::equal(now.begin(), now.end(), before.begin(), before.end(),
                      [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); });
  }
  if (!same)
    throw InvalidArgument(
        fmt::format("ShardedOptimizer: its parameter groups have changed ({} groups now, {} when it was made), but are "
                    "fixed: do not call add_param_group(); wrap the model again and make a new optimizer",
                    param_groups_.size(), expected.size()));
}

void ShardedOptimizerBase::check_owner() const {
  using State = Reducer::SinkRegistration::State;
  const State state = shards_->registration->state();
  if (state == State::kReplaced)
    throw InvalidArgument(
        "another ShardedOptimizer has been made of the same DistributedDataParallel and receives its gradients now: "
        "step that one, and destroy this one");
  if (state == State::kNoReducer)
    throw InvalidArgument(
        "the DistributedDataParallel of this ShardedOptimizer has been destroyed, or its module wrapped again: make a "
        "ShardedOptimizer of the new wrapper");
}

void ShardedOptimizerBase::update(double factor) {
  check_groups();
  {
    const LentGroups lent(param_groups_, shards_->inner->param_groups());
    shards_->inner->step_scaled(factor);
  }
  // Slices have version counters of their own, but what autograd saved is the parameter.
  for (std::size_t i = 0; i < shards_->slices.size(); ++i) {
    if (shards_->slices[i].grad().defined()) shards_->parameters[i].tensor.unsafeGetTensorImpl()->bump_version();
  }
}

at::Tensor ShardedOptimizerBase::step(LossClosure closure) {
  if (closure)
    throw InvalidArgument("ShardedOptimizer takes no closure: call loss.backward() first and step() after it");
  step_scaled(1);
  return {};
}

void ShardedOptimizerBase::step_scaled(double factor) {
  if (shards_->options.update_in_backward && factor != 1)
    throw InvalidArgument(
        "gradients cannot be scaled after backward where update_in_backward has used them up there: make the "
        "ShardedOptimizer without it");
  check_owner();
  announce(Shards::kStep);
  step_together(factor);
}

void ShardedOptimizerBase::step_together(double factor) {
  const at::NoGradGuard no_grad;
  Shards& shards = *shards_;
  shards.consolidated.reset();
  try {
    shards.follow_parameters();
    if (shards.options.update_in_backward) {
      if (shards.weights && shards.weights->is_written())
        throw InvalidArgument(
            "a parameter has been written to between backward and step(): with update_in_backward it is being updated "
            "there; write to it after step()");
    } else {
      factor = follow_active_ranks({factor})[0];
      // From here on nobody reads the weights, and all have the same.
      if (shards.weights) shards.weights->settle();
      update(factor);
      shards.drop_gradients();
    }
  } catch (const std::exception& error) {
    shards.group.abort(error.what());
    throw;
  }
  if (shards.weights) {
    shards.group.barrier();
  } else {
    shards.gather_weights();
  }
}

void ShardedOptimizerBase::zero_grad(bool set_to_none) {
  // Not torch::optim's, which detaches gradients in place: a slice's may be a view.
  const at::NoGradGuard no_grad;
  if (set_to_none) {
    shards_->drop_gradients();
  } else {
    for (at::Tensor& slice : shards_->slices) {
      if (slice.grad().defined()) slice.mutable_grad().zero_();
    }
  }
  for (NamedParameter& parameter : shards_->parameters) parameter.tensor.mutable_grad().reset();
  shards_->dropped = true;
}

double ShardedOptimizerBase::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  if (shards_->options.update_in_backward)
    throw InvalidArgument(
        "gradients cannot be clipped after backward where update_in_backward has used them up there: make the "
        "ShardedOptimizer without it");
  check_owner();
  announce(Shards::kClip);
  return clip_together({max_norm, norm_type, error_if_nonfinite ? 1.0 : 0.0});
}

/// `arguments`: max_norm, norm_type, error_if_nonfinite.
double ShardedOptimizerBase::clip_together(std::vector<double> arguments) {
  arguments = follow_active_ranks(std::move(arguments));
  const double max_norm = arguments[0], norm_type = arguments[1];
  Shards& shards = *shards_;
  const double own = grad_norm(shards.slices, norm_type);
  const bool largest = std::isinf(norm_type);
  const at::Tensor sum = at::full({1}, largest ? own : std::pow(own, norm_type),
                                  at::TensorOptions(at::kDouble).device(shards.group.device()));
  shards.group.all_reduce(sum, largest ? ReduceOp::kMax : ReduceOp::kSum);
  const double together = sum.item<double>();
  shards.group.check();
  const double norm = largest ? together : std::pow(together, 1 / norm_type);
  scale_gradients_(shards.slices, clip_factor(norm, max_norm, norm_type, arguments[2] != 0));
  return norm;
}

}  // namespace ddpkit::optim
