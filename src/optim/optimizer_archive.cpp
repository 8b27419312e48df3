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

template <class Optimizer, class State, class Options>
struct Kind {
  static bool wrap(torch::optim::OptimizerParamGroup& group, double rate) {
    const auto* options = dynamic_cast<const Options*>(&std::as_const(group).options());
    if (!options) return false;
    group.set_options(std::make_unique<WithInitialRate<Options>>(*options, rate));
    return true;
  }
  static bool load(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive) {
    if (typeid(optimizer) != typeid(Optimizer)) return false;
    read_archive<State, Options>(archive, optimizer);
    return true;
  }
};

template <class... All>
struct Kinds {
  static void wrap(torch::optim::OptimizerParamGroup& group, double rate) { (void)(... || All::wrap(group, rate)); }
  static bool load(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive) {
    return (... || All::load(optimizer, archive));
  }
};

using Known = Kinds<Kind<torch::optim::AdamW, torch::optim::AdamWParamState, torch::optim::AdamWOptions>,
                    Kind<torch::optim::Adam, torch::optim::AdamParamState, torch::optim::AdamOptions>,
                    Kind<torch::optim::SGD, torch::optim::SGDParamState, torch::optim::SGDOptions>,
                    Kind<torch::optim::Adagrad, torch::optim::AdagradParamState, torch::optim::AdagradOptions>,
                    Kind<torch::optim::RMSprop, torch::optim::RMSpropParamState, torch::optim::RMSpropOptions>,
                    Kind<torch::optim::LBFGS, torch::optim::LBFGSParamState, torch::optim::LBFGSOptions>>;

}  // namespace

std::optional<double> initial_rate(const torch::optim::OptimizerOptions& options) {
  const auto* known = dynamic_cast<const InitialRate*>(&options);
  return known ? std::optional(known->initial_lr) : std::nullopt;
}

void set_initial_rate(torch::optim::OptimizerParamGroup& group, double rate) { Known::wrap(group, rate); }

void load_archive(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive) {
  if (!Known::load(optimizer, archive)) optimizer.load(archive);
}

}  // namespace ddpkit::optim
