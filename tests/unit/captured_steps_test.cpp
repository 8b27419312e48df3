// What a CUDA graph of step() relies on, tested on the CPU: the device's scalars are CPU tensors here.
#include <torch/torch.h>

#include <sstream>

#include <ddpkit/error.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>

#include "support/catch.h"
#include "unit/optimizer_parameters.h"

using ddpkit::optim::FusedAdamW;
using ddpkit::optim::FusedOptimizer;
using ddpkit::optim::FusedSGD;
using ddpkit::testing::flat_state;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

namespace {

FusedOptimizer::Impl& internals(const FusedOptimizer& optimizer) { return FusedOptimizer::Impl::of(optimizer); }

/// Returns the scalar that a kernel on a device would read.
torch::Tensor rate_of(FusedSGD& optimizer) {
  return internals(optimizer).device_learning_rate(optimizer.param_groups()[0].options(), torch::kCPU);
}

/// Returns the step count of the AdamW state, which archives store.
std::int64_t steps(const FusedAdamW& optimizer, const torch::Tensor& parameter) {
  const auto& state = optimizer.state().at(parameter.unsafeGetTensorImpl());
  return static_cast<const torch::optim::AdamWParamState&>(*state).step();
}

std::string archive_of(const FusedAdamW& optimizer) {
  std::ostringstream stream;
  torch::save(optimizer, stream);
  return stream.str();
}

void load(FusedAdamW& optimizer, const std::string& archive) {
  std::istringstream stream(archive);
  torch::load(optimizer, stream);
}

}  // namespace

TEST_CASE("a captured step reads the learning rate and never writes it", "[optim][graph]") {
  auto weight = torch::ones({2}).requires_grad_(true);
  FusedSGD optimizer({weight}, SGDOptions(0.5), {.capturable = true});
  const torch::Tensor rate = rate_of(optimizer);
  optimizer.param_groups()[0].options().set_lr(0.25);
  internals(optimizer).begin_capture();
  CHECK(rate_of(optimizer).is_same(rate));
  CHECK(rate.item<float>() == 0.5);  // A fill_() here would be part of every replay.
  internals(optimizer).end_capture();
  for (const double now : {0.25, 0.125}) {
    optimizer.param_groups()[0].options().set_lr(now);
    internals(optimizer).before_replay();
    CHECK(rate.item<float>() == now);
  }
  // A later schedule gives the group another options object.
  optimizer.param_groups()[0].set_options(std::make_unique<SGDOptions>(0.75));
  internals(optimizer).before_replay();
  CHECK(rate_of(optimizer).is_same(rate));
  CHECK(rate.item<float>() == 0.75);
}

TEST_CASE("replays count the captured parameters, and notify autograd of the writes", "[optim][graph]") {
  auto weight = torch::ones({2}).requires_grad_(true), idle = torch::ones({2}).requires_grad_(true);
  FusedAdamW optimizer({weight, idle}, AdamWOptions(0.1), {.capturable = true});
  const auto step = [&] {
    weight.mutable_grad() = torch::ones({2});
    optimizer.step();
    optimizer.zero_grad();  // Runs last in the step: no gradient shows which parameters were updated.
  };
  step();
  CHECK(steps(optimizer, weight) == 1);
  internals(optimizer).begin_capture();
  step();
  internals(optimizer).end_capture();
  CHECK(steps(optimizer, weight) == 1);
  const std::string archive = archive_of(optimizer);
  const auto loss = (weight * weight).sum();
  for (int replay = 0; replay < 3; ++replay) internals(optimizer).before_replay();
  CHECK(steps(optimizer, weight) == 4);
  CHECK_THROWS_WITH(loss.backward(), ContainsSubstring("modified by an inplace operation"));

  const void* place = flat_state(optimizer)[0].tensors[0].const_data_ptr();
  load(optimizer, archive);
  CHECK(flat_state(optimizer)[0].tensors[0].const_data_ptr() == place);
  internals(optimizer).before_replay();
  CHECK(steps(optimizer, weight) == 2);
}

TEST_CASE("changes that a replay cannot follow are refused", "[optim][graph]") {
  auto weight = torch::ones({2}).requires_grad_(true), late = torch::ones({2}).requires_grad_(true);
  const auto give = [](const torch::Tensor& parameter) { parameter.mutable_grad() = torch::ones({2}); };
  FusedAdamW optimizer({weight, late}, AdamWOptions(0.1), {.capturable = true});
  give(weight);
  optimizer.step();
  give(late);
  internals(optimizer).begin_capture();
  CHECK_THROWS_WITH(optimizer.step(), ContainsSubstring("parameter 1 of group 0") && ContainsSubstring("warmup"));
  internals(optimizer).end_capture();
  CHECK(steps(optimizer, weight) == 1);
  optimizer.step();
  const auto capture = [&] {
    internals(optimizer).begin_capture();
    optimizer.step();
    internals(optimizer).end_capture();
    internals(optimizer).before_replay();
  };
  const auto check_refused = [&](const char* what) {
    CHECK_THROWS_WITH(internals(optimizer).before_replay(),
                      ContainsSubstring(what) && ContainsSubstring("new GraphedStep"));
    capture();
  };
  capture();
  static_cast<AdamWOptions&>(optimizer.param_groups()[0].options()).weight_decay(0.5);
  check_refused("option other than the learning rate");
  weight.set_data(torch::zeros({2}));
  check_refused("memory of a parameter");
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({torch::ones({2}).requires_grad_(true)}));
  check_refused("parameters changed");
}
