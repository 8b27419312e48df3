#include "optim/fused_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/serialize/archive.h>

#include <unordered_set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/clip_grad_norm.h>

#include "optim/optimizer_archive.h"
#include "optim/shard_memory.h"
#include "parallel/sharding/gathered_use.h"
#include "tensor/flat_layout.h"
#include "tensor/tensor_memory.h"

namespace ddpkit::optim {
namespace {

constexpr std::size_t kMaster = Algorithm::kMaster;

[[noreturn]] void refuse(const at::Tensor& parameter, std::size_t group, std::size_t index, const std::string& why) {
  throw InvalidArgument(fmt::format("parameter {} of group {}, a {} [{}] on {}, {}", index, group,
                                    c10::toString(parameter.scalar_type()), fmt::join(parameter.sizes(), ", "),
                                    parameter.device().str(), why));
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return (a.is_contiguous() && b.is_contiguous()) || a.strides() == b.strides();
}

}  // namespace

void FusedOptimizer::Impl::Layout::add(std::size_t group, std::size_t index, const at::Tensor& parameter, bool master) {
  if (!has_update_kernels(parameter.scalar_type()))
    refuse(parameter, group, index,
           "has a type that the fused optimizers do not update (they take float32, float64, bfloat16 and float16): "
           "give it to an optimizer of torch::optim");
  std::size_t flat = 0;
  while (flat < flats.size() && !(flats[flat].group == group && flats[flat].dtype == parameter.scalar_type() &&
                                  flats[flat].device == parameter.device()))
    ++flat;
  if (flat == flats.size()) {
    FlatState& added = flats.emplace_back();
    added.group = group;
    added.dtype = parameter.scalar_type();
    added.device = parameter.device();
    lengths.push_back(0);
    masters.push_back(master);
  }
  slots[group].push_back({.parameter = parameter,
                          .strides = parameter.strides().vec(),
                          .dtype = parameter.scalar_type(),
                          .device = parameter.device(),
                          .flat = flat,
                          .offset = lengths[flat],
                          .dense = parameter.is_non_overlapping_and_dense()});
  flats[flat].parameters.push_back(parameter);
  flats[flat].offsets.push_back(lengths[flat]);
  lengths[flat] += aligned_numel(parameter.numel(), parameter.element_size());
}

Algorithm::StateTensors& FusedOptimizer::Impl::Layout::tensors_of(Slot& slot) {
  FlatState& flat = flats[slot.flat];
  const std::size_t count = counts[flat.group];
  const bool master = masters[slot.flat];
  const auto zeros = [&] {
    const at::ScalarType dtype = master ? at::kFloat : flat.dtype;
    return memory ? memory->zeros(lengths[slot.flat], dtype)
                  : at::zeros({lengths[slot.flat]}, at::dtype(dtype).device(flat.device));
  };
  const auto part_of = [&](const at::Tensor& whole) {
    const at::Tensor part = whole.narrow(0, slot.offset, slot.parameter.numel());
    return slot.dense ? part.as_strided(slot.parameter.sizes(), slot.strides, part.storage_offset())
                      : part.view(slot.parameter.sizes());
  };
  while (flat.tensors.size() < count) flat.tensors.push_back(zeros());
  for (std::size_t k = 0; k < count && !slot.tensors[k].defined(); ++k) slot.tensors[k] = part_of(flat.tensors[k]);
  if (master && !slot.tensors[kMaster].defined()) {
    // A zero master marks it as uninitialized: it differs from every nonzero parameter, so the first update copies the
    // parameter.
    if (!flat.master.defined()) flat.master = zeros();
    slot.tensors[kMaster] = part_of(flat.master);
  }
  return slot.tensors;
}

FusedOptimizer::Impl::Impl(const Algorithm& algorithm, const FusedOptions& options)
    : algorithm_(algorithm), options_(options) {}

FusedOptimizer::Impl::~Impl() = default;

const std::vector<torch::optim::OptimizerParamGroup>& FusedOptimizer::Impl::checked(
    const std::vector<torch::optim::OptimizerParamGroup>& groups) const {
  for (const auto& group : groups) {
    if (group.has_options()) algorithm_.check(group.options());
  }
  return groups;
}

void FusedOptimizer::Impl::attach(torch::optim::Optimizer& optimizer) {
  optimizer_ = &optimizer;
  for (const auto& group : param_groups()) algorithm_.check(std::as_const(group).options());
  algorithm_.check(optimizer.defaults());
  drop_duplicates();
}

/// A parameter with several names counts once.
void FusedOptimizer::Impl::drop_duplicates() {
  std::unordered_set<const void*> seen;
  for (std::size_t g = 0; g < param_groups().size(); ++g) {
    auto distinct = distinct_parameters(std::as_const(param_groups()[g]).params());
    for (std::size_t i = 0; i < distinct.size(); ++i) {
      if (!seen.insert(distinct[i].unsafeGetTensorImpl()).second)
        refuse(distinct[i], g, i, "is in an earlier parameter group too: give each parameter to one group");
    }
    param_groups()[g].params() = std::move(distinct);
  }
}

bool FusedOptimizer::Impl::fits_layout() {
  if (!layout_ || layout_->slots.size() != param_groups().size()) return false;
  for (std::size_t g = 0; g < param_groups().size(); ++g) {
    const auto& parameters = param_groups()[g].params();
    const auto& slots = layout_->slots[g];
    if (slots.size() != parameters.size() || layout_->counts[g] != algorithm_.tensor_count(param_groups()[g].options()))
      return false;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (!slots[i].fits(parameters[i])) return false;
    }
  }
  return true;
}

FusedOptimizer::Impl::Layout& FusedOptimizer::Impl::layout() {
  if (fits_layout()) return *layout_;
  drop_duplicates();  // add_param_group() of torch::optim::Optimizer keeps duplicates.
  if (fits_layout()) return *layout_;
  auto fresh = std::make_unique<Layout>();
  fresh->memory = memory_;
  for (std::size_t g = 0; g < param_groups().size(); ++g) {
    fresh->slots.emplace_back();
    fresh->counts.push_back(algorithm_.tensor_count(param_groups()[g].options()));
    const auto& parameters = std::as_const(param_groups()[g]).params();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      fresh->add(g, i, parameters[i], has_master(parameters[i].scalar_type()));
  }
  adopt(*fresh);
  place(*fresh);
  layout_ = std::move(fresh);
  return *layout_;
}

/// Moves existing state into the flat state.
void FusedOptimizer::Impl::adopt(Layout& layout) {
  const at::NoGradGuard no_grad;
  for (std::size_t g = 0; g < layout.slots.size(); ++g) {
    for (Layout::Slot& slot : layout.slots[g]) {
      const auto found = states().find(slot.parameter.unsafeGetTensorImpl());
      if (found == states().end() || layout.is_stateless(slot)) continue;
      StateTensors before = algorithm_.tensors_of(*found->second);
      StateTensors& tensors = layout.tensors_of(slot);
      // State that has not started stays undefined: momentum starts with the next gradient.
      StateTensors adopted;
      for (std::size_t k = 0; k < tensors.size(); ++k) {
        if (!before[k].defined() || !tensors[k].defined()) continue;
        if (before[k].sizes() != slot.parameter.sizes())
          throw InvalidArgument(fmt::format(
              "the optimizer's state is of another model: a tensor of it is [{}] where the parameter is [{}]",
              fmt::join(before[k].sizes(), ", "), fmt::join(slot.parameter.sizes(), ", ")));
        if (!before[k].is_same(tensors[k])) tensors[k].copy_(before[k]);
        adopted[k] = tensors[k];
      }
      algorithm_.set_tensors(*found->second, adopted);
    }
  }
}

/// Other ranks may read the state from now on.
void FusedOptimizer::Impl::place(Layout& layout) {
  if (!memory_) return;
  for (const auto& group : layout.slots) {
    for (const Layout::Slot& slot : group) memory_->place(slot.parameter, slot.tensors);
  }
}

void FusedOptimizer::Impl::step(double factor) {
  const at::NoGradGuard no_grad;
  Layout& layout = this->layout();
  const bool capturing = capture_ && capture_->capturing;
  if (options_.maximize) factor = -factor;
  for (std::size_t f = 0; f < layout.flats.size(); ++f) {
    const std::size_t g = layout.flats[f].group;
    layout.updates.clear();
    std::vector<std::pair<at::Tensor, at::Tensor>> staged;  // Noncontiguous parameters and their copies.
    for (std::size_t i = 0; i < layout.slots[g].size(); ++i) {
      Layout::Slot& slot = layout.slots[g][i];
      if (slot.flat != f) continue;
      const at::Tensor& parameter = slot.parameter;
      const at::Tensor& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      if (gradient.layout() != at::kStrided)
        refuse(parameter, g, i, "has a sparse gradient: give it to torch::optim::SGD, or make its layer not sparse");
      if (GatheredParameter::is_gathered(parameter))
        refuse(parameter, g, i, "is sharded by FullyShardedDataParallel: use a ShardedOptimizer of it");
      Algorithm::Update& update = layout.updates.emplace_back();
      update.original = update.parameter = parameter;
      if (!slot.dense) {
        update.parameter = parameter.contiguous();
        staged.emplace_back(parameter, update.parameter);
      }
      update.gradient = gradient;
      if (gradient.scalar_type() != slot.dtype || !same_layout(update.parameter, gradient))
        update.gradient =
            at::empty_strided(parameter.sizes(), update.parameter.strides(), parameter.options().requires_grad(false))
                .copy_(gradient);
      if (layout.is_stateless(slot)) continue;
      auto& state = states()[parameter.unsafeGetTensorImpl()];
      if (!state) state = make_state();
      update.state = state.get();
      StateTensors& tensors = layout.tensors_of(slot);
      const StateTensors before = algorithm_.tensors_of(*state);
      update.fresh = !before[0].defined();
      bool same = true;
      for (std::size_t k = 0; k < tensors.size(); ++k) {
        if (!tensors[k].defined() || before[k].is_same(tensors[k])) continue;
        // The state is new, or the program has replaced the state tensors.
        if (capturing)
          refuse(parameter, g, i,
                 "has no state yet in the step that GraphedStep captures, and every replay would reset it: raise "
                 "warmup_iterations until each parameter has had a gradient");
        same = false;
        before[k].defined() ? tensors[k].copy_(before[k]) : tensors[k].zero_();
      }
      if (!same) {
        algorithm_.set_tensors(*state, tensors);
        if (memory_) memory_->place(parameter, tensors);
      }
      update.tensors = tensors;
      if (memory_) update.undo = memory_->undo_log(parameter, tensors);
    }
    if (!layout.updates.empty()) update(param_groups()[g].options(), layout, factor);
    for (const auto& [parameter, copy] : staged) parameter.copy_(copy);
    for (const Algorithm::Update& update : layout.updates) {
      // Kernels that write through a pointer do not notify autograd, which may have saved the parameter for backward.
      update.original.unsafeGetTensorImpl()->bump_version();
      if (capturing) capture_->parameters.push_back(update.original);
    }
  }
  layout.updates.clear();
}

/// CPU kernels support master weights. LibTorch's GPU kernels receive the master weights as parameters.
void FusedOptimizer::Impl::update(const torch::optim::OptimizerOptions& options, Layout& layout, double factor) {
  std::vector<Algorithm::Update>& updates = layout.updates;
  if (updates[0].parameter.is_cpu()) return algorithm_.update(options, updates, factor, {});
  at::Tensor rate;
  if (options_.capturable) {
    rate = device_learning_rate(options, updates[0].parameter.device());
    for (Algorithm::Update& update : updates) {
      if (update.state) update.steps = device_steps(update.original, *update.state);
    }
  }
  if (!updates[0].tensors[kMaster].defined()) return algorithm_.update(options, updates, factor, rate);
  std::vector<at::Tensor> parameters;
  for (Algorithm::Update& update : updates) {
    at::Tensor& master = update.tensors[kMaster];
    const at::Tensor& parameter = parameters.emplace_back(update.parameter.detach());
    master.copy_(at::where(master.to(parameter.scalar_type()) == parameter, master, parameter.to(at::kFloat)));
    update.gradient = update.gradient.to(at::kFloat);
    update.parameter = std::exchange(master, at::Tensor());
  }
  algorithm_.update(options, updates, factor, rate);
  for (std::size_t i = 0; i < updates.size(); ++i) parameters[i].copy_(updates[i].parameter);
}

bool FusedOptimizer::Impl::has_master(at::ScalarType dtype) const noexcept {
  return options_.master_weights && (dtype == at::kBFloat16 || dtype == at::kHalf);
}

const std::vector<FlatState>& FusedOptimizer::Impl::flat_state() { return layout().flats; }

std::vector<Algorithm::StateTensors> FusedOptimizer::Impl::state_memory() {
  const at::NoGradGuard no_grad;
  std::vector<StateTensors> all;
  Layout& layout = this->layout();
  for (auto& group : layout.slots) {
    for (Layout::Slot& slot : group)
      all.push_back(layout.is_stateless(slot) ? StateTensors() : layout.tensors_of(slot));
  }
  place(layout);
  return all;
}

void FusedOptimizer::Impl::save(torch::serialize::OutputArchive& archive) {
  // torch::save() would write the whole storage of a view.
  const at::NoGradGuard no_grad;
  std::vector<std::pair<torch::optim::OptimizerParamState*, StateTensors>> views;
  const auto restore = [&] {
    for (const auto& [state, tensors] : views) algorithm_.set_tensors(*state, tensors);
  };
  try {
    for (const auto& [key, state] : states()) {
      StateTensors tensors = algorithm_.tensors_of(*state);
      views.emplace_back(state.get(), tensors);
      for (at::Tensor& tensor : tensors) {
        if (tensor.defined()) tensor = tensor.clone();
      }
      algorithm_.set_tensors(*state, tensors);
    }
    algorithm_.write(archive, *optimizer_);
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

void FusedOptimizer::Impl::load(torch::serialize::InputArchive& archive) {
  replace_state([&] { algorithm_.read(archive, *optimizer_, options_.master_weights); });
}

void FusedOptimizer::Impl::replace_state(const std::function<void()>& fill) {
  const at::NoGradGuard no_grad;
  // Restores the state if an exception is thrown.
  auto before = std::exchange(states(), {});
  auto layout_before = std::move(layout_);
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
  for (const auto& group : param_groups()) options.push_back(group.options().clone());
  try {
    fill();
    layout();
  } catch (...) {
    states() = std::move(before);
    layout_ = std::move(layout_before);
    for (std::size_t g = 0; g < options.size(); ++g) param_groups()[g].set_options(std::move(options[g]));
    throw;
  }
  // A CUDA graph may hold the addresses of the state.
  std::swap(layout_, layout_before);
  if (fits_layout()) {
    for (FlatState& flat : layout_->flats) {
      for (at::Tensor& tensor : flat.tensors) tensor.zero_();
      if (flat.master.defined()) flat.master.zero_();
    }
    adopt(*layout_);
  } else {
    std::swap(layout_, layout_before);
  }
  place(*layout_);
  set_device_steps();
}

// ---- the public class

FusedOptimizer::FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                               std::unique_ptr<torch::optim::OptimizerOptions> defaults, std::unique_ptr<Impl> impl)
    : torch::optim::Optimizer(impl->checked(groups), std::move(defaults)), impl_(std::move(impl)) {
  impl_->attach(*this);
}

FusedOptimizer::~FusedOptimizer() = default;

at::Tensor FusedOptimizer::step(LossClosure closure) {
  if (closure)
    throw InvalidArgument(
        "the fused optimizers take no closure: call loss.backward() first and step() after it, or use "
        "torch::optim::LBFGS, which needs one");
  step_scaled(1);
  return {};
}

void FusedOptimizer::step_scaled(double factor) { impl_->step(factor); }

double FusedOptimizer::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : param_groups_)
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite);
}

void FusedOptimizer::save(torch::serialize::OutputArchive& archive) const { impl_->save(archive); }
void FusedOptimizer::load(torch::serialize::InputArchive& archive) { impl_->load(archive); }
const FusedOptions& FusedOptimizer::fused_options() const noexcept { return impl_->options(); }

void load_archive(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive) {
  if (!read_known_archive(archive, optimizer)) optimizer.load(archive);
}

}  // namespace ddpkit::optim
