#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <unordered_set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>
#include <ddpkit/train/state_dict.h>

namespace ddpkit::train {
namespace {

/// In the order of Python's state_dict(): parameters, buffers, then children of a module.
void collect(const torch::nn::Module& module, const std::string& prefix, StateDict& state) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    if (item.value().defined()) state[prefix + item.key()] = item.value().detach();
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    if (item.value().defined()) state[prefix + item.key()] = item.value().detach();
  }
  for (const auto& child : module.named_children()) collect(*child.value(), prefix + child.key() + ".", state);
}

}  // namespace

StateDict module_state(const torch::nn::Module& module) {
  StateDict state;
  collect(module, "", state);
  return state;
}

IncompatibleKeys load_module_state(torch::nn::Module& module, const StateDict& state,
                                   const LoadModuleOptions& options) {
  IncompatibleKeys keys;
  std::vector<std::string> shapes;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  const StateDict own = module_state(module);
  for (const auto& [key, value] : own) {
    const std::string& name = std::get<std::string>(key);
    const StateValue* found = state.find(key);
    if (!found) {
      keys.missing.push_back(name);
      continue;
    }
    const auto* tensor = found->get_if<at::Tensor>();
    const at::Tensor& target = value.to_tensor();
    if (!tensor || !tensor->defined())
      throw InvalidArgument(fmt::format("the state dict has something that is no tensor for {}", name));
    if (tensor->sizes() != target.sizes())
      shapes.push_back(fmt::format("{} is [{}] there and [{}] here", name, fmt::join(tensor->sizes(), ", "),
                                   fmt::join(target.sizes(), ", ")));
    copies.emplace_back(target, *tensor);
  }
  for (const auto& item : state) {
    if (own.contains(item.key)) continue;
    keys.unexpected.push_back(describe(item.key));
  }
  std::vector<std::string> differences;
  if (options.strict && !keys.missing.empty())
    differences.push_back(fmt::format("it lacks {}", fmt::join(keys.missing, ", ")));
  if (options.strict && !keys.unexpected.empty())
    differences.push_back(fmt::format("unexpected are {}", fmt::join(keys.unexpected, ", ")));
  differences.insert(differences.end(), shapes.begin(), shapes.end());
  if (!differences.empty())
    throw InvalidArgument(
        fmt::format("the state dict is of another model than {}: {}", module.name(), fmt::join(differences, "; ")));
  const at::NoGradGuard no_grad;
  for (auto& [target, value] : copies) target.copy_(value);
  return keys;
}

}  // namespace ddpkit::train
