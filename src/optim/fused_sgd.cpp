#include <ddpkit/optim/fused_sgd.h>

#include <ATen/ops/_fused_sgd.h>

#include <optional>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "kernels/optimizer.h"
#include "optim/algorithm.h"
#include "optim/fused_optimizer.h"

namespace ddpkit::optim {
namespace {

using Options = torch::optim::SGDOptions;
using State = torch::optim::SGDParamState;
using Update = Algorithm::Update;

const Options& checked(const torch::optim::OptimizerOptions& any) {
  const auto* options = dynamic_cast<const Options*>(&any);
  if (!options)
    throw InvalidArgument("a parameter group has the options of another optimizer: FusedSGD takes SGDOptions");
  if (!(options->lr() >= 0) || !(options->momentum() >= 0) || !(options->weight_decay() >= 0))
    throw InvalidArgument(
        fmt::format("lr, momentum and weight_decay must not be negative; they are lr {}, momentum {}, weight_decay {}",
                    options->lr(), options->momentum(), options->weight_decay()));
  if (options->nesterov() && (!(options->momentum() > 0) || options->dampening() != 0))
    throw InvalidArgument(
        fmt::format("Nesterov's momentum needs a momentum and no dampening; they are momentum {}, dampening {}",
                    options->momentum(), options->dampening()));
  return *options;
}

void update_on_cpu(const Options& options, const std::vector<Update>& updates, double factor) {
  for_update_blocks(updates, [&](std::size_t, const Update& update, const UpdateBlock& block) {
    kernels::sgd({.dtype = block.dtype,
                  .numel = block.count,
                  .parameter = block.of(update.parameter),
                  .gradient = block.of(update.gradient),
                  .momentum_buffer = options.momentum() != 0 ? block.of(update.tensors[0]) : nullptr,
                  .master = static_cast<float*>(block.of(update.tensors[Algorithm::kMaster])),
                  .constants = {.lr = options.lr(),
                                .momentum = options.momentum(),
                                .dampening = options.dampening(),
                                .weight_decay = options.weight_decay(),
                                .nesterov = options.nesterov(),
                                .first = update.fresh,
                                .gradient_factor = factor}});
  });
}

/// `rate`: a number or a device scalar.
template <class Rate>
void update_on_device(const Options& options, const std::vector<Update>& updates, double factor, const Rate& rate) {
  const std::optional<at::Tensor> scale = scale_of(factor, updates[0].parameter.device());
  for (const bool fresh : {true, false}) {
    std::vector<at::Tensor> parameters, gradients, buffers;
    for (const Update& update : updates) {
      if (update.fresh != fresh) continue;
      parameters.push_back(update.parameter);
      gradients.push_back(update.gradient);
      if (options.momentum() != 0) buffers.push_back(update.tensors[0]);
    }
    if (parameters.empty()) continue;
    at::_fused_sgd_(parameters, gradients, buffers, options.weight_decay(), options.momentum(), rate,
                    options.dampening(), options.nesterov(), factor < 0, fresh, scale, std::nullopt);
  }
}

class Sgd final : public AlgorithmOf<Options, State> {
 public:
  void check(const AnyOptions& any) const override { checked(any); }
  std::size_t tensor_count(const AnyOptions& any) const override { return checked(any).momentum() != 0 ? 1 : 0; }
  void update(const AnyOptions& any, std::vector<Update>& updates, double factor,
              const at::Tensor& rate) const override {
    const Options& options = checked(any);
    if (updates[0].parameter.is_cpu())
      update_on_cpu(options, updates, factor);
    else if (rate.defined())
      update_on_device(options, updates, factor, rate);
    else
      update_on_device(options, updates, factor, options.lr());
  }

 private:
  StateTensors own_tensors_of(const State& state) const override { return {state.momentum_buffer()}; }
  void set_own_tensors(State& state, const StateTensors& tensors) const override { state.momentum_buffer(tensors[0]); }
};

}  // namespace

template <>
const Algorithm& algorithm_of<Options>() {
  static const Sgd algorithm;
  return algorithm;
}

template class FusedOptimizerWith<Options>;

}  // namespace ddpkit::optim
