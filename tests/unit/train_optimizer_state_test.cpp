// tests/peers/state_dicts.py compares with Python's optimizers. These tests check the rest.
#include <torch/torch.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/optim/learning_rate.h>
#include <ddpkit/train/optimizer_state.h>

#include "support/catch.h"
#include "unit/optimizer_parameters.h"

using namespace ddpkit::train;
using ddpkit::optim::FusedAdamW;
using ddpkit::optim::FusedSGD;
using ddpkit::testing::flat_state;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

namespace {

torch::Tensor weight(std::int64_t size = 4, torch::Dtype dtype = torch::kFloat) {
  return torch::ones({size, 3}, dtype).requires_grad_(true);
}

void step(torch::optim::Optimizer& optimizer) {
  for (auto& group : optimizer.param_groups()) {
    for (auto& parameter : group.params()) parameter.mutable_grad() = torch::full_like(parameter, 0.5);
  }
  optimizer.step();
}

const StateDict& state_of(const StateDict& state, std::int64_t index) {
  return state.at("state").to_dict().at(index).to_dict();
}

}  // namespace

TEST_CASE("an optimizer's state is copied, at its own size", "[state_dict]") {
  auto a = weight(), b = weight(7);
  FusedAdamW optimizer({a, b}, AdamWOptions(0.1));
  CHECK(optimizer_state(optimizer).at("state").to_dict().empty());
  step(optimizer);
  const StateDict state = optimizer_state(optimizer);
  const auto moment = state_of(state, 1).at("exp_avg").to_tensor();
  CHECK(moment.storage().nbytes() == 7 * 3 * 4);
  CHECK(state_of(state, 0).at("step").to_tensor().item<float>() == 1);
  const auto before = moment.clone();
  step(optimizer);
  CHECK(torch::equal(moment, before));
  CHECK_FALSE(state_of(state, 0).contains("max_exp_avg_sq"));
  // A load copies the state too, and stores it flat immediately.
  FusedAdamW other({a, b}, AdamWOptions(0.7));
  step(other);
  load_optimizer_state(other, state);
  CHECK(other.param_groups()[0].options().get_lr() == 0.1);
  const auto& flat = flat_state(other).at(0);
  CHECK(torch::equal(flat.tensors.at(0).narrow(0, flat.offsets.at(1), 21).view({7, 3}), before));
  CHECK_FALSE(flat.tensors.at(0).storage().is_alias_of(moment.storage()));
}

TEST_CASE("a state counts a weight under two names once, whoever updates it", "[state_dict]") {
  auto a = weight(), b = weight(7);
  torch::optim::AdamW of_torch({a, b, a}, AdamWOptions(0.1));
  FusedAdamW fused({a, b, a}, AdamWOptions(0.1));
  for (torch::optim::Optimizer* optimizer : std::initializer_list<torch::optim::Optimizer*>{&of_torch, &fused}) {
    step(*optimizer);
    const StateDict state = optimizer_state(*optimizer);
    CHECK(state.at("state").to_dict().size() == 2);
    CHECK(state.at("param_groups").to_items()[0].to_dict().at("params").to_items().size() == 2);
    load_optimizer_state(of_torch, state);
    load_optimizer_state(fused, state);
    step(of_torch);
    step(fused);
  }
}

TEST_CASE("a state has the rate before any schedule, as Python's", "[state_dict]") {
  auto a = weight();
  torch::optim::AdamW optimizer({a}, AdamWOptions(0.1)), other({a}, AdamWOptions(0.7));
  const auto group_of = [](const StateDict& state) { return state.at("param_groups").to_items()[0].to_dict(); };
  CHECK_FALSE(group_of(optimizer_state(optimizer)).contains("initial_lr"));
  ddpkit::optim::LearningRateScheduler scheduler(optimizer, ddpkit::optim::step_decay(1));
  scheduler.step();
  const StateDict state = optimizer_state(optimizer);
  CHECK(group_of(state).at("initial_lr").to_double() == 0.1);
  load_optimizer_state(other, state);
  ddpkit::optim::LearningRateScheduler after(other, ddpkit::optim::step_decay(1));
  CHECK(after.base_learning_rates() == std::vector<double>{0.1});
}

TEST_CASE("a state takes the parameters' type", "[state_dict]") {
  auto a = weight(), b = weight(4, torch::kDouble);
  torch::optim::AdamW first(std::vector<torch::Tensor>{a}, AdamWOptions(0.1)),
      second(std::vector<torch::Tensor>{b}, AdamWOptions(0.1));
  step(first);
  load_optimizer_state(second, optimizer_state(first));
  const auto& state = static_cast<torch::optim::AdamWParamState&>(*second.state().at(b.unsafeGetTensorImpl()));
  CHECK(state.exp_avg().dtype() == torch::kDouble);
  CHECK(state.step() == 1);
}

TEST_CASE("an optimizer's state of another optimizer is refused and changes nothing", "[state_dict]") {
  auto a = weight(), b = weight(), c = weight(5);
  FusedAdamW two({a, b}, AdamWOptions(0.1));
  step(two);
  const StateDict state = optimizer_state(two);
  const auto refuse = [&](torch::optim::Optimizer& optimizer, const StateDict& given, const char* reason) {
    step(optimizer);
    const double lr = optimizer.param_groups()[0].options().get_lr();
    const auto before = optimizer_state(optimizer);
    CHECK_THROWS_WITH(load_optimizer_state(optimizer, given), ContainsSubstring(reason));
    CHECK(optimizer.param_groups()[0].options().get_lr() == lr);
    CHECK(optimizer_state(optimizer).at("state").to_dict().size() == before.at("state").to_dict().size());
  };
  FusedAdamW one({a}, AdamWOptions(0.3)), other({a, c}, AdamWOptions(0.3)), same({a, b}, AdamWOptions(0.3));
  FusedAdamW groups({torch::optim::OptimizerParamGroup({a}), torch::optim::OptimizerParamGroup({b})},
                    AdamWOptions(0.3));
  FusedAdamW up({a, b}, AdamWOptions(0.3), {.maximize = true});
  FusedSGD sgd({a, b}, SGDOptions(0.3).momentum(0.9));
  ddpkit::optim::FusedAdam adam({a, b}, torch::optim::AdamOptions(0.3));
  refuse(one, state, "group 0 of the optimizer's state has 2 parameters, and the optimizer's 1");
  refuse(other, state, "exp_avg is [4, 3] where the parameter is [5, 3]");
  refuse(groups, state, "has 1 parameter groups, and the optimizer 2");
  refuse(up, state, "goes down the gradient, and this one goes up");
  refuse(sgd, state, "no 'momentum'");
  refuse(adam, state, "the other one of Adam and AdamW");
  refuse(same, {}, "no 'param_groups'");
  torch::optim::Adagrad adagrad({a}, torch::optim::AdagradOptions(0.1));
  CHECK_THROWS_WITH(optimizer_state(adagrad), ContainsSubstring("torch::optim::Adagrad is not known"));
  CHECK_THROWS_AS(load_optimizer_state(adagrad, state), ddpkit::InvalidArgument);
}
