#include "optim/optimizer_archive.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <typeinfo>

namespace ddpkit::optim {
namespace {

/// Calls `action` with each optimizer type of torch::optim until it returns true.
template <class Action>
bool for_each_kind(const Action& action) {
  namespace lib = torch::optim;
  return action.template operator()<lib::AdamW, lib::AdamWParamState, lib::AdamWOptions>() ||
         action.template operator()<lib::Adam, lib::AdamParamState, lib::AdamOptions>() ||
         action.template operator()<lib::SGD, lib::SGDParamState, lib::SGDOptions>() ||
         action.template operator()<lib::Adagrad, lib::AdagradParamState, lib::AdagradOptions>() ||
         action.template operator()<lib::RMSprop, lib::RMSpropParamState, lib::RMSpropOptions>() ||
         action.template operator()<lib::LBFGS, lib::LBFGSParamState, lib::LBFGSOptions>();
}

}  // namespace

std::optional<double> initial_rate(const torch::optim::OptimizerOptions& options) {
  const auto* known = dynamic_cast<const InitialRate*>(&options);
  return known ? std::optional(known->initial_lr) : std::nullopt;
}

void set_initial_rate(torch::optim::OptimizerParamGroup& group, double rate) {
  for_each_kind([&]<class Optimizer, class State, class Options>() {
    const auto* options = dynamic_cast<const Options*>(&std::as_const(group).options());
    if (options) group.set_options(std::make_unique<WithInitialRate<Options>>(*options, rate));
    return options != nullptr;
  });
}

bool read_known_archive(torch::serialize::InputArchive& archive, torch::optim::Optimizer& optimizer) {
  return for_each_kind([&]<class Optimizer, class State, class Options>() {
    if (typeid(optimizer) != typeid(Optimizer)) return false;
    read_archive<State, Options>(archive, optimizer);
    return true;
  });
}

}  // namespace ddpkit::optim
