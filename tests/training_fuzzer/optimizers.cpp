#include "optimizers.h"

#include <algorithm>

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>

#include "parallel/ddp/shard_output.h"

namespace ddpkit::fuzz {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

/// Far above the noise of gradients that are zero except for rounding errors.
constexpr double kEpsilon = 1e-3;

/// Calls `make(options, tag of torch's type, tag of ddpkit's type)`.
template <class T>
struct Tag {
  using Type = T;
};
template <class Make>
auto with_options(const OptimizerChoice& choice, const Make& make) {
  if (choice.kind == "sgd")
    return make(torch::optim::SGDOptions(base_rate(choice, 0))
                    .momentum(choice.momentum)
                    .nesterov(choice.nesterov && choice.momentum > 0)
                    .weight_decay(choice.weight_decay),
                Tag<torch::optim::SGD>(), Tag<optim::FusedSGD>());
  const auto adam = [&](auto options) {
    options.eps(kEpsilon).amsgrad(choice.amsgrad).weight_decay(choice.weight_decay);
    return options;
  };
  if (choice.kind == "adam")
    return make(adam(torch::optim::AdamOptions(base_rate(choice, 0))), Tag<torch::optim::Adam>(),
                Tag<optim::FusedAdam>());
  return make(adam(torch::optim::AdamWOptions(base_rate(choice, 0))), Tag<torch::optim::AdamW>(),
              Tag<optim::FusedAdamW>());
}

template <class Options>
Groups groups_of(const OptimizerChoice& choice, const std::vector<at::Tensor>& parameters, const Options& options) {
  std::vector<std::vector<at::Tensor>> parts(static_cast<std::size_t>(choice.groups));
  for (std::size_t i = 0; i < parameters.size(); ++i) parts[i % parts.size()].push_back(parameters[i]);
  Groups groups;
  for (std::size_t g = 0; g < parts.size(); ++g) {
    auto own = std::make_unique<Options>(options);
    own->lr(base_rate(choice, g));
    groups.emplace_back(parts[g], std::move(own));
  }
  return groups;
}

}  // namespace

double base_rate(const OptimizerChoice& choice, std::size_t group) {
  return (choice.kind == "sgd" ? 0.1 : 0.02) * (1 + 0.5 * static_cast<double>(group));
}

double schedule_factor(std::int64_t steps) { return 1 / (1 + 0.5 * static_cast<double>(steps)); }

std::unique_ptr<torch::optim::Optimizer> make_torch_optimizer(const OptimizerChoice& choice,
                                                              const std::vector<at::Tensor>& parameters) {
  return with_options(choice, [&](const auto& options, auto torchs, auto) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<typename decltype(torchs)::Type>(groups_of(choice, parameters, options), options);
  });
}

Optimizer make_optimizer(const OptimizerChoice& choice, const std::vector<at::Tensor>& parameters,
                         DistributedDataParallelBase* ddp) {
  Optimizer made;
  if (choice.engine == "torch") {
    made.base = make_torch_optimizer(choice, parameters);
    return made;
  }
  const optim::FusedOptions fused_options{.maximize = choice.maximize};
  with_options(choice, [&](const auto& options, auto, auto fuseds) {
    using Fused = typename decltype(fuseds)::Type;
    if (choice.engine == "fused") {
      auto fused = std::make_unique<Fused>(groups_of(choice, parameters, options), options, fused_options);
      made.fused = fused.get();
      made.base = std::move(fused);
      return;
    }
    optim::ShardedOptions sharded_options{.update_in_backward = choice.in_backward};
    sharded_options.shared_weights = !choice.own_weights && ddp->group().backend_name() == "shm";
    std::unique_ptr<optim::ShardedOptimizer<Fused>> sharded;
    if (choice.groups == 1) {
      sharded = std::make_unique<optim::ShardedOptimizer<Fused>>(*ddp, options, sharded_options, fused_options);
    } else {
      std::vector<at::Tensor> own;
      for (const NamedParameter& parameter : parameters_of(ddp->reducer())) own.push_back(parameter.tensor);
      std::vector<at::Tensor> in_order;  // In the model's order, so that the reference has the same groups.
      for (const at::Tensor& parameter : parameters)
        for (const at::Tensor& known : own)
          if (parameter.is_same(known)) in_order.push_back(parameter);
      sharded = std::make_unique<optim::ShardedOptimizer<Fused>>(*ddp, groups_of(choice, in_order, options), options,
                                                                 sharded_options, fused_options);
    }
    made.sharded = sharded.get();
    made.base = std::move(sharded);
  });
  return made;
}

void report_tensor(Report& report, std::uint32_t event, Kind kind, const std::string& name, const at::Tensor& tensor) {
  Entry entry;
  entry.event = event;
  entry.kind = kind;
  entry.name = name;
  if (tensor.defined()) {
    at::Tensor values = tensor.detach();
    if (values.layout() == at::kSparse) values = values.to_dense();
    if (values.is_complex()) values = at::view_as_real(values.resolve_conj());
    values = values.to(at::kDouble).contiguous();
    const double* data = values.const_data_ptr<double>();
    entry.values.assign(data, data + values.numel());
  }
  report.entries.push_back(std::move(entry));  // Reading a sharded parameter may throw: then there is no entry.
}

void report_state(Report& report, std::uint32_t event, const torch::optim::Optimizer& optimizer, Model& model) {
  const auto ignored = model.ignored_names();
  for (const auto& item : model.named_parameters()) {
    const bool own = std::find(ignored.begin(), ignored.end(), item.key()) != ignored.end();
    const Kind kind = own ? Kind::kLocal : Kind::kWeight;
    const auto found = optimizer.state().find(item.value().unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    const auto add = [&](const char* what, const at::Tensor& tensor) {
      if (tensor.defined()) report_tensor(report, event, kind, "state " + item.key() + "." + what, tensor);
    };
    const auto adam = [&](const auto& state) {
      add("step", at::scalar_tensor(state.step(), at::kDouble));
      add("exp_avg", state.exp_avg());
      add("exp_avg_sq", state.exp_avg_sq());
      add("max_exp_avg_sq", state.max_exp_avg_sq());
    };
    if (const auto* sgd = dynamic_cast<const torch::optim::SGDParamState*>(found->second.get()))
      add("momentum_buffer", sgd->momentum_buffer());
    if (const auto* state = dynamic_cast<const torch::optim::AdamParamState*>(found->second.get())) adam(*state);
    if (const auto* state = dynamic_cast<const torch::optim::AdamWParamState*>(found->second.get())) adam(*state);
  }
}

}  // namespace ddpkit::fuzz
