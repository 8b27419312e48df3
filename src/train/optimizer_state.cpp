#include <ddpkit/train/optimizer_state.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/clip_grad_norm.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/optim/sharded_optimizer.h>

#include "optim/fused_optimizer.h"
#include "optim/optimizer_archive.h"
#include "optim/shards.h"

namespace ddpkit::train {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;
using States = std::vector<std::pair<void*, std::unique_ptr<OptimizerParamState>>>;
using MakeState = std::function<std::unique_ptr<OptimizerParamState>()>;

/// Returns a number, or the value of a scalar tensor. Python stores steps, and sometimes learning rates, as tensors.
double number_of(const StateValue& value) {
  const auto* tensor = value.get_if<at::Tensor>();
  if (!tensor) return value.to_double();
  if (tensor->numel() != 1) throw InvalidArgument("an optimizer's state has a tensor where one number is needed");
  return tensor->item<double>();
}

bool flag_of(const StateDict& group, const std::string& name) {
  const StateValue* value = group.find(name);
  return value && !value->is_none() && value->to_bool();
}

/// Returns a copy of state `name` with the parameter's layout and device; undefined if the state does not exist.
at::Tensor tensor_of(const StateDict& state, const std::string& name, const at::Tensor& parameter,
                     at::ScalarType dtype) {
  const StateValue* value = state.find(name);
  if (!value || value->is_none()) return {};
  const at::Tensor& tensor = value->to_tensor();
  if (tensor.sizes() != parameter.sizes())
    throw InvalidArgument(
        fmt::format("the optimizer's state is of another model: its {} is [{}] where the parameter is [{}]", name,
                    fmt::join(tensor.sizes(), ", "), fmt::join(parameter.sizes(), ", ")));
  return at::empty_like(parameter, parameter.options().dtype(dtype).requires_grad(false)).copy_(tensor);
}

void put(StateDict& state, const std::string& name, const at::Tensor& tensor) {
  if (tensor.defined()) state[name] = tensor.detach().clone();
}

/// Adam and AdamW: LibTorch has two types with the same members.
template <class Options, class State, bool kDecoupled>
struct AdamLayout {
  static StateDict group(const OptimizerOptions& any, bool maximize) {
    const auto& options = dynamic_cast<const Options&>(any);
    const auto [beta1, beta2] = options.betas();
    return {{"lr", options.lr()},
            {"betas", StateTuple{{beta1, beta2}}},
            {"eps", options.eps()},
            {"weight_decay", options.weight_decay()},
            {"amsgrad", options.amsgrad()},
            {"maximize", maximize},
            {"foreach", {}},
            {"capturable", false},
            {"differentiable", false},
            {"fused", {}},
            {"decoupled_weight_decay", kDecoupled}};
  }
  static std::unique_ptr<OptimizerOptions> options(const StateDict& group) {
    const auto& betas = group.at("betas").to_items();
    if (betas.size() != 2) throw InvalidArgument("an optimizer's state has betas that are not two");
    auto options = std::make_unique<Options>(number_of(group.at("lr")));
    options->betas({number_of(betas[0]), number_of(betas[1])});
    options->eps(number_of(group.at("eps")));
    options->weight_decay(number_of(group.at("weight_decay")));
    options->amsgrad(flag_of(group, "amsgrad"));
    if (const StateValue* decoupled = group.find("decoupled_weight_decay");
        decoupled && decoupled->to_bool() != kDecoupled)
      throw InvalidArgument("the optimizer's state is of the other one of Adam and AdamW");
    return options;
  }
  static StateDict state(const OptimizerParamState& any) {
    const auto& state = static_cast<const State&>(any);
    StateDict dict{{"step", at::scalar_tensor(state.step(), at::kFloat)}};
    put(dict, "exp_avg", state.exp_avg());
    put(dict, "exp_avg_sq", state.exp_avg_sq());
    put(dict, "max_exp_avg_sq", state.max_exp_avg_sq());
    return dict;
  }
  static void fill(OptimizerParamState& any, const StateDict& dict, const at::Tensor& parameter, at::ScalarType dtype) {
    auto& state = static_cast<State&>(any);
    state.step(static_cast<std::int64_t>(number_of(dict.at("step"))));
    for (const char* name : {"exp_avg", "exp_avg_sq"}) (void)dict.at(name);
    state.exp_avg(tensor_of(dict, "exp_avg", parameter, dtype));
    state.exp_avg_sq(tensor_of(dict, "exp_avg_sq", parameter, dtype));
    state.max_exp_avg_sq(tensor_of(dict, "max_exp_avg_sq", parameter, dtype));
  }
};

struct SgdLayout {
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;

  static StateDict group(const OptimizerOptions& any, bool maximize) {
    const auto& options = dynamic_cast<const Options&>(any);
    return {{"lr", options.lr()},
            {"momentum", options.momentum()},
            {"dampening", options.dampening()},
            {"weight_decay", options.weight_decay()},
            {"nesterov", options.nesterov()},
            {"maximize", maximize},
            {"foreach", {}},
            {"differentiable", false},
            {"fused", {}}};
  }
  static std::unique_ptr<OptimizerOptions> options(const StateDict& group) {
    auto options = std::make_unique<Options>(number_of(group.at("lr")));
    options->momentum(number_of(group.at("momentum")));
    options->dampening(number_of(group.at("dampening")));
    options->weight_decay(number_of(group.at("weight_decay")));
    options->nesterov(flag_of(group, "nesterov"));
    return options;
  }
  static StateDict state(const OptimizerParamState& any) {
    StateDict dict;
    put(dict, "momentum_buffer", static_cast<const State&>(any).momentum_buffer());
    return dict;
  }
  static void fill(OptimizerParamState& any, const StateDict& dict, const at::Tensor& parameter, at::ScalarType dtype) {
    static_cast<State&>(any).momentum_buffer(tensor_of(dict, "momentum_buffer", parameter, dtype));
  }
};

template <class Layout>
StateDict state_in(const Optimizer& optimizer, bool maximize) {
  StateDict states;
  StateList groups;
  std::int64_t index = 0;
  for (const auto& group : optimizer.param_groups()) {
    StateDict entry = Layout::group(group.options(), maximize);
    StateList indices;
    if (const auto rate = optim::initial_rate(group.options())) entry["initial_lr"] = *rate;
    for (const at::Tensor& parameter : optim::distinct_parameters(group.params())) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found != optimizer.state().end()) {
        StateDict state = Layout::state(*found->second);
        if (const auto* master = dynamic_cast<const optim::MasterWeight*>(found->second.get()))
          put(state, "master_param", master->master_param);
        if (!state.empty()) states[index] = std::move(state);
      }
      indices.emplace_back(index++);
    }
    entry["params"] = std::move(indices);
    groups.emplace_back(std::move(entry));
  }
  return {{"state", std::move(states)}, {"param_groups", std::move(groups)}};
}

/// Throws before it changes anything.
template <class Layout>
void load_in(Optimizer& optimizer, optim::FusedOptimizer::Impl* fused, const MakeState& make_state,
             const StateDict& state) {
  const bool maximize = fused && fused->options().maximize;
  const auto& groups = state.at("param_groups").to_items();
  const StateDict& states = state.at("state").to_dict();
  if (groups.size() != optimizer.param_groups().size())
    throw InvalidArgument(fmt::format("the optimizer's state has {} parameter groups, and the optimizer {}",
                                      groups.size(), optimizer.param_groups().size()));
  States filled;
  std::vector<std::unique_ptr<OptimizerOptions>> options;
  std::vector<std::optional<double>> rates;  // [group]
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const StateDict& group = groups[g].to_dict();
    const auto parameters = optim::distinct_parameters(std::as_const(optimizer).param_groups()[g].params());
    const auto& indices = group.at("params").to_items();
    if (indices.size() != parameters.size())
      throw InvalidArgument(fmt::format("group {} of the optimizer's state has {} parameters, and the optimizer's {}",
                                        g, indices.size(), parameters.size()));
    if (flag_of(group, "maximize") != maximize)
      throw InvalidArgument(
          fmt::format("the optimizer's state is of one that goes {} the gradient, and this one goes {}",
                      maximize ? "down" : "up", maximize ? "up" : "down"));
    options.push_back(Layout::options(group));
    const StateValue* rate = group.find("initial_lr");
    rates.push_back(rate ? std::optional(number_of(*rate)) : std::nullopt);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const StateValue* found = states.find(indices[i].to_int());
      if (!found || found->to_dict().empty()) continue;
      filled.emplace_back(parameters[i].unsafeGetTensorImpl(), make_state());
      OptimizerParamState& made = *filled.back().second;
      auto* master =
          fused && fused->has_master(parameters[i].scalar_type()) ? dynamic_cast<optim::MasterWeight*>(&made) : nullptr;
      const at::ScalarType dtype = master ? at::kFloat : parameters[i].scalar_type();
      Layout::fill(made, found->to_dict(), parameters[i], dtype);
      if (master) master->master_param = tensor_of(found->to_dict(), "master_param", parameters[i], dtype);
    }
  }
  const auto replace = [&] {
    optimizer.state().clear();
    for (auto& [parameter, made] : filled) optimizer.state()[parameter] = std::move(made);
    for (std::size_t g = 0; g < options.size(); ++g) {
      optimizer.param_groups()[g].set_options(std::move(options[g]));
      if (rates[g]) optim::set_initial_rate(optimizer.param_groups()[g], *rates[g]);
    }
  };
  fused ? fused->replace_state(replace) : replace();
}

/// Calls `function(Layout, State)` for the type of `optimizer`.
template <class Function>
void with_layout(const Optimizer& optimizer, const Function& function) {
  using AdamW = AdamLayout<torch::optim::AdamWOptions, torch::optim::AdamWParamState, true>;
  using Adam = AdamLayout<torch::optim::AdamOptions, torch::optim::AdamParamState, false>;
  const auto is = [&]<class... Kinds>(std::type_identity<Kinds>...) {
    return (... || (dynamic_cast<const Kinds*>(&optimizer) != nullptr));
  };
  if (is(std::type_identity<torch::optim::AdamW>(), std::type_identity<optim::FusedAdamW>())) {
    function(AdamW(), torch::optim::AdamWParamState());
  } else if (is(std::type_identity<torch::optim::Adam>(), std::type_identity<optim::FusedAdam>())) {
    function(Adam(), torch::optim::AdamParamState());
  } else if (is(std::type_identity<torch::optim::SGD>(), std::type_identity<optim::FusedSGD>())) {
    function(SgdLayout(), torch::optim::SGDParamState());
  } else {
    throw InvalidArgument(fmt::format(
        "the state of {} is not known in Python's layout, only that of AdamW, Adam and SGD: use torch::save",
        c10::demangle(typeid(optimizer).name())));
  }
}

}  // namespace

StateDict optimizer_state(const Optimizer& optimizer) {
  if (const auto* sharded = dynamic_cast<const optim::ShardedOptimizerBase*>(&optimizer))
    return optimizer_state(sharded->consolidated());
  const at::NoGradGuard no_grad;
  const auto* fused = dynamic_cast<const optim::FusedOptimizer*>(&optimizer);
  StateDict state;
  with_layout(optimizer, [&](auto layout, const auto&) {
    state = state_in<decltype(layout)>(optimizer, fused && fused->fused_options().maximize);
  });
  return state;
}

void load_optimizer_state(Optimizer& optimizer, const StateDict& state) {
  const at::NoGradGuard no_grad;
  if (auto* sharded = dynamic_cast<optim::ShardedOptimizerBase*>(&optimizer)) {
    optim::Shards& shards = optim::Shards::of(*sharded);
    const auto whole = shards.make_whole();
    load_optimizer_state(*whole, state);
    shards.take_state(*whole);
    return;
  }
  const auto* derived = dynamic_cast<const optim::FusedOptimizer*>(&optimizer);
  auto* fused = derived ? &optim::FusedOptimizer::Impl::of(*derived) : nullptr;
  with_layout(optimizer, [&](auto layout, const auto& prototype) {
    using State = std::decay_t<decltype(prototype)>;
    const auto make_state = [&]() -> std::unique_ptr<OptimizerParamState> {
      return fused ? fused->make_state() : std::make_unique<State>();
    };
    load_in<decltype(layout)>(optimizer, fused, make_state, state);
  });
}

}  // namespace ddpkit::train
