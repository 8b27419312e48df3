#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <map>
#include <typeinfo>

#include <c10/util/Type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>
#include <ddpkit/parallel/sync_batch_norm.h>

namespace ddpkit {
namespace {

using torch::nn::Module;
using ModulePtr = std::shared_ptr<Module>;

/// The planned changes, collected before anything is changed.
struct Plan {
  struct Replacement {
    Module* container;
    ModulePtr old;
  };
  std::vector<Replacement> replacements;
  std::vector<SyncBatchNormImpl*> already;  ///< SyncBatchNorm layers that only need the group.
  std::vector<std::string> names;           ///< Names of all these layers.
  std::vector<std::string> refused;
};

template <class Impl>
std::shared_ptr<SyncBatchNormImpl> same_as(const Module& old, const ProcessGroup& group) {
  const auto* norm = dynamic_cast<const Impl*>(&old);
  if (!norm) return nullptr;
  auto sync = std::make_shared<SyncBatchNormImpl>(
      norm->options,
      BatchNormTensors{norm->weight, norm->bias, norm->running_mean, norm->running_var, norm->num_batches_tracked},
      group);
  sync->train(norm->is_training());
  return sync;
}

/// Creates a SyncBatchNorm with the tensors of a BatchNorm1d, 2d or 3d.
std::shared_ptr<SyncBatchNormImpl> synchronized(const Module& old, const ProcessGroup& group) {
  if (auto sync = same_as<torch::nn::BatchNorm1dImpl>(old, group)) return sync;
  if (auto sync = same_as<torch::nn::BatchNorm2dImpl>(old, group)) return sync;
  return same_as<torch::nn::BatchNorm3dImpl>(old, group);
}

template <class... Types>
bool is_a(const Module& module) {
  return (... || (dynamic_cast<const Types*>(&module) != nullptr));
}

template <class... Types>
bool is_exactly(const Module& module) {
  return (... || (typeid(module) == typeid(Types)));
}

bool is_batch_norm(const Module& module) {
  return is_a<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl>(module);
}

/// Returns whether `module` is a container with a public list that contains `child`.
bool holds(Module& module, const ModulePtr& child) {
  if (auto* sequential = module.as<torch::nn::SequentialImpl>())
    return std::any_of(sequential->begin(), sequential->end(), [&](const auto& any) { return any.ptr() == child; });
  if (auto* list = module.as<torch::nn::ModuleListImpl>())
    return std::find(list->begin(), list->end(), child) != list->end();
  if (auto* dict = module.as<torch::nn::ModuleDictImpl>())
    return std::any_of(dict->begin(), dict->end(), [&](const auto& item) { return item.value() == child; });
  return false;
}

void look_through(Module& module, const std::string& prefix, Plan& plan) {
  for (const auto& child : module.named_children()) {
    if (!child.value()) continue;
    const std::string name = prefix + child.key();
    if (auto* sync = child.value()->as<SyncBatchNormImpl>()) {
      plan.already.push_back(sync);
      plan.names.push_back(name);
    } else if (!is_batch_norm(*child.value())) {
      look_through(*child.value(), name + ".", plan);
    } else if (!is_exactly<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl>(
                   *child.value())) {
      plan.refused.push_back(fmt::format("{} is a {}, whose own behaviour would be lost", name,
                                         c10::demangle(typeid(*child.value()).name())));
    } else if (!holds(module, child.value())) {
      plan.refused.push_back(fmt::format("{} is a member of {}", name, c10::demangle(typeid(module).name())));
    } else {
      plan.replacements.push_back({&module, child.value()});
      plan.names.push_back(name);
    }
  }
}

/// Replaces a module in the container's list and in its registered children.
void exchange(Module& container, const ModulePtr& old, const std::shared_ptr<SyncBatchNormImpl>& sync) {
  for (const auto& child : container.named_children()) {
    if (child.value() != old) continue;
    if (auto* dict = container.as<torch::nn::ModuleDictImpl>(); dict && dict->contains(child.key()))
      dict->update(std::vector<std::pair<std::string, ModulePtr>>{{child.key(), sync}});
    container.replace_module(child.key(), sync);
  }
  if (auto* sequential = container.as<torch::nn::SequentialImpl>()) {
    for (torch::nn::AnyModule& module : *sequential) {
      if (module.ptr() == old) module = torch::nn::AnyModule(sync);
    }
  }
  if (auto* list = container.as<torch::nn::ModuleListImpl>())
    std::replace(list->begin(), list->end(), old, ModulePtr(sync));
}

}  // namespace

std::vector<std::string> convert_sync_batchnorm(torch::nn::Module& module, const ProcessGroup& group) {
  if (is_batch_norm(module))
    throw InvalidArgument(
        "convert_sync_batchnorm: the module is itself a batch norm, which can't become another type in place: make it "
        "a ddpkit::SyncBatchNorm");
  Plan plan;
  if (auto* sync = dynamic_cast<SyncBatchNormImpl*>(&module)) {
    plan.already.push_back(sync);
    plan.names.emplace_back();
  }
  look_through(module, "", plan);
  if (!plan.refused.empty())
    throw InvalidArgument(fmt::format(
        "convert_sync_batchnorm can't reach {} of the model's batch norms: {}. Declare them as ddpkit::SyncBatchNorm "
        "instead, which is plain batch norm until it has a group, or put them into a Sequential; nothing was changed",
        plan.refused.size(), fmt::join(plan.refused, "; ")));
  for (SyncBatchNormImpl* sync : plan.already) sync->set_process_group(group);
  // A batch norm that is registered several times stays one shared layer.
  std::map<const Module*, std::shared_ptr<SyncBatchNormImpl>> made;
  for (const auto& [container, old] : plan.replacements) {
    auto& sync = made[old.get()];
    if (!sync) sync = synchronized(*old, group);
    exchange(*container, old, sync);
  }
  return plan.names;
}

}  // namespace ddpkit
