#include <ddpkit/optim/sharded_optimizer.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "optim/optimizer_archive.h"
#include "optim/shards.h"
#include "parallel/join_session.h"
#include "parallel/model_agreement.h"

namespace ddpkit::optim {
namespace {

enum JoinEvent : int { kStep, kClip };

}  // namespace

std::vector<at::Tensor> ShardedOptimizerBase::parameters_of(const DistributedDataParallelBase& ddp) {
  std::vector<at::Tensor> tensors;
  for (const NamedParameter& parameter : ddp.reducer().parameters()) tensors.push_back(parameter.tensor);
  return tensors;
}

ShardedOptimizerBase::ShardedOptimizerBase(DistributedDataParallelBase& ddp, const Groups& groups,
                                           std::unique_ptr<torch::optim::OptimizerOptions> defaults, Factory factory,
                                           const ShardedOptions& options)
    : ShardedOptimizerBase(std::make_shared<Shards>(ddp, groups, std::move(defaults), std::move(factory), options)) {
  ShardOutput::attach(shards_, ddp.reducer());
}

ShardedOptimizerBase::ShardedOptimizerBase(std::shared_ptr<Shards> shards)
    : torch::optim::Optimizer(shards->groups, std::move(shards->defaults)), shards_(std::move(shards)) {
  shards_->owner = this;
}

ShardedOptimizerBase::~ShardedOptimizerBase() = default;

// A join() session stays with the object that was passed to join().
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
  const ShardOutput::State state = shards_->state();
  if (state == ShardOutput::State::kReplaced)
    throw InvalidArgument(
        "another ShardedOptimizer has been made of the same DistributedDataParallel and receives its gradients now: "
        "step that one, and destroy this one");
  if (state == ShardOutput::State::kNoReducer)
    throw InvalidArgument(
        "the DistributedDataParallel of this ShardedOptimizer has been destroyed, or its module wrapped again: make a "
        "ShardedOptimizer of the new wrapper");
}

void ShardedOptimizerBase::update(double factor) {
  check_groups();
  {
    const auto lent = shards_->lend_groups();
    shards_->inner->step_scaled(factor);
  }
  // Pieces have separate version counters, but autograd saved the parameter.
  for (std::size_t i = 0; i < shards_->pieces.size(); ++i) {
    if (shards_->pieces[i].grad().defined()) shards_->parameters[i].tensor.unsafeGetTensorImpl()->bump_version();
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
        "gradients cannot be scaled after backward: with update_in_backward, backward has already applied them; make "
        "the ShardedOptimizer without it");
  check_owner();
  announce(kStep);
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
            "a parameter was written to between backward and step(): with update_in_backward its update is still in "
            "progress; write to it after step()");
    } else {
      factor = follow_active_ranks({factor})[0];
      // After this line no rank reads the weights, and all ranks have the same weights.
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
  // torch::optim's zero_grad() detaches gradients in place, but the gradient of a piece may be a view.
  const at::NoGradGuard no_grad;
  if (set_to_none) {
    shards_->drop_gradients();
  } else {
    for (at::Tensor& piece : shards_->pieces) {
      if (piece.grad().defined()) piece.mutable_grad().zero_();
    }
  }
  for (NamedParameter& parameter : shards_->parameters) parameter.tensor.mutable_grad().reset();
  shards_->dropped = true;
}

double ShardedOptimizerBase::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  if (shards_->options.update_in_backward)
    throw InvalidArgument(
        "gradients cannot be clipped after backward: with update_in_backward, backward has already applied them; make "
        "the ShardedOptimizer without it");
  check_owner();
  announce(kClip);
  return clip_together({max_norm, norm_type, error_if_nonfinite ? 1.0 : 0.0});
}

/// `arguments`: max_norm, norm_type, error_if_nonfinite.
double ShardedOptimizerBase::clip_together(std::vector<double> arguments) {
  arguments = follow_active_ranks(std::move(arguments));
  const double max_norm = arguments[0], norm_type = arguments[1];
  Shards& shards = *shards_;
  const double own = grad_norm(shards.pieces, norm_type);
  const bool largest = std::isinf(norm_type);
  const at::Tensor sum = at::full({1}, largest ? own : std::pow(own, norm_type),
                                  at::TensorOptions(at::kDouble).device(shards.group.device()));
  shards.group.all_reduce(sum, largest ? ReduceOp::kMax : ReduceOp::kSum);
  const double together = sum.item<double>();
  shards.group.check();
  const double norm = largest ? together : std::pow(together, 1 / norm_type);
  scale_gradients_(shards.pieces, clip_factor(norm, max_norm, norm_type, arguments[2] != 0));
  return norm;
}

// ---- state

std::unique_ptr<FusedOptimizer> ShardedOptimizerBase::make_whole() const {
  check_groups();
  Groups groups;
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    std::vector<at::Tensor> parameters;
    for (const std::size_t index : shards_->group_of[g]) parameters.push_back(shards_->parameters[index].tensor);
    groups.emplace_back(parameters, param_groups_[g].options().clone());
  }
  return shards_->factory(groups);
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
  shards.gather_state(whole.get(), to);
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
  check_groups();
  shards_->consolidated.reset();
  shards_->take_state(whole);
}

// ---- join: ranks without inputs still update their shards, with the settings of the active ranks

const ProcessGroup& ShardedOptimizerBase::join_group() const { return shards_->group; }

void ShardedOptimizerBase::join_shadow(int event) {
  if (event == kClip) {
    clip_together({0, 2, 0});
  } else {
    step_together(1);
  }
}

void ShardedOptimizerBase::join_end(int source) {
  if (source < 0) return;
  const ProcessGroup& group = shards_->group;
  const std::string bytes = group.all_gather_bytes(settings({}))[static_cast<std::size_t>(source)];
  if (group.rank() != source) take_settings(bytes);
}

void ShardedOptimizerBase::announce(int event) {
  if (join_) return join_->announce(join_index_, event);
  if (JoinSession::running(shards_->group))
    throw InvalidArgument(
        "a ShardedOptimizer calls collectives: pass it to join() with the DistributedDataParallel, "
        "join({ddp, optimizer}, loop)");
}

/// Collective. Called within join() by ranks without inputs. These ranks copy the settings that the active ranks have
/// changed. `arguments`: of the active ranks' call. Returns the active ranks' arguments on all ranks.
std::vector<double> ShardedOptimizerBase::follow_active_ranks(std::vector<double> arguments) {
  Shards& shards = *shards_;
  if (!join_ || join_->active() == shards.group.world_size()) {
    shards.dropped = false;
    return arguments;
  }
  const bool active = JoinSession::running(shards.group) != nullptr;
  const auto source = static_cast<std::size_t>(join_->first_active(active));
  const std::string bytes = shards.group.all_gather_bytes(active ? settings(arguments) : std::string())[source];
  shards.dropped = false;
  return active ? arguments : take_settings(bytes);
}

std::string ShardedOptimizerBase::settings(const std::vector<double>& arguments) const {
  torch::serialize::OutputArchive archive;
  archive.write("arguments", c10::IValue(arguments));
  // zero_grad() through a torch::optim::Optimizer& does not set `dropped`, but removes all gradients.
  const bool none = std::none_of(shards_->pieces.begin(), shards_->pieces.end(),
                                 [](const at::Tensor& piece) { return piece.grad().defined(); });
  archive.write("dropped", c10::IValue(shards_->dropped || none));
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    torch::serialize::OutputArchive options(archive.compilation_unit());
    param_groups_[g].options().serialize(options);
    archive.write(fmt::format("group{}", g), options);
  }
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

/// Returns the arguments.
std::vector<double> ShardedOptimizerBase::take_settings(const std::string& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    torch::serialize::InputArchive options;
    archive.read(fmt::format("group{}", g), options);
    param_groups_[g].options().serialize(options);
  }
  if (read_value(archive, "dropped").toBool()) shards_->drop_gradients();
  return read_value(archive, "arguments").toDoubleVector();
}

}  // namespace ddpkit::optim
