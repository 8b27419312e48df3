// Compares the fused optimizers with LibTorch's on equal parameters and gradients, and tests the errors.
#include <torch/torch.h>

#include <memory>
#include <vector>

#include <ddpkit/optim/clip_grad_norm.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>

#include "support/catch.h"
#include "unit/optimizer_parameters.h"

using namespace ddpkit::testing;
using ddpkit::optim::FusedAdam;
using ddpkit::optim::FusedAdamW;
using ddpkit::optim::FusedSGD;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

namespace {

template <class Ours, class Theirs, class Options>
void check_against_libtorch(const Options& options) {
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    const auto parameters = make_parameters(dtype);
    const auto references = copies_of(parameters);
    Ours ours(parameters, options);
    Theirs theirs(references, options);
    take_steps(0, 15, parameters, ours, references, theirs);
    check_same(parameters, references, dtype == torch::kDouble ? 1e-12 : 1e-6);
  }
}

}  // namespace

TEST_CASE("FusedAdamW equals torch::optim::AdamW", "[optim]") {
  check_against_libtorch<FusedAdamW, torch::optim::AdamW>(AdamWOptions(1e-2));
  check_against_libtorch<FusedAdamW, torch::optim::AdamW>(AdamWOptions(1e-2).weight_decay(0));
  check_against_libtorch<FusedAdamW, torch::optim::AdamW>(
      AdamWOptions(3e-3).betas({0.8, 0.95}).eps(1e-4).weight_decay(0.3));
  check_against_libtorch<FusedAdamW, torch::optim::AdamW>(AdamWOptions(1e-2).amsgrad(true));
}

TEST_CASE("FusedAdam equals torch::optim::Adam", "[optim]") {
  check_against_libtorch<FusedAdam, torch::optim::Adam>(AdamOptions(1e-2));
  check_against_libtorch<FusedAdam, torch::optim::Adam>(
      AdamOptions(3e-3).betas({0.8, 0.95}).eps(1e-4).weight_decay(0.3));
  check_against_libtorch<FusedAdam, torch::optim::Adam>(AdamOptions(1e-2).weight_decay(0.1).amsgrad(true));
}

TEST_CASE("FusedSGD equals torch::optim::SGD", "[optim]") {
  check_against_libtorch<FusedSGD, torch::optim::SGD>(SGDOptions(1e-2));
  check_against_libtorch<FusedSGD, torch::optim::SGD>(SGDOptions(1e-2).weight_decay(0.1));
  check_against_libtorch<FusedSGD, torch::optim::SGD>(SGDOptions(1e-2).momentum(0.9));
  check_against_libtorch<FusedSGD, torch::optim::SGD>(SGDOptions(1e-2).momentum(0.9).dampening(0.4).weight_decay(0.01));
  check_against_libtorch<FusedSGD, torch::optim::SGD>(SGDOptions(1e-2).momentum(0.9).nesterov(true).weight_decay(0.01));
}

TEST_CASE("half types are updated in float", "[optim]") {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const auto parameters = make_parameters(dtype);
    std::vector<torch::Tensor> references;
    for (const auto& parameter : parameters)
      references.push_back(parameter.detach().to(torch::kFloat).requires_grad_(true));
    // After one step the state is not rounded yet: the result of float32, rounded once.
    FusedAdamW adam(parameters, AdamWOptions(0.1));
    torch::optim::AdamW adam_reference(references, AdamWOptions(0.1));
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = torch::randn(parameters[i].sizes()).to(dtype);
      references[i].mutable_grad() = parameters[i].grad().to(torch::kFloat);
    }
    adam.step();
    adam_reference.step();
    const double half_unit = dtype == torch::kHalf ? 1.0 / 1024 : 1.0 / 128;
    check_same(parameters, references, half_unit);
    REQUIRE(flat_state(adam)[0].tensors[0].scalar_type() == dtype);
    // The loss decreases.
    auto weight = torch::full({100}, 3.0, torch::dtype(dtype)).requires_grad_(true);
    FusedSGD sgd({weight}, SGDOptions(0.1).momentum(0.5));
    for (int step = 0; step < 60; ++step) {
      sgd.zero_grad();
      weight.square().sum().backward();
      sgd.step();
    }
    CHECK(weight.abs().max().item<double>() < 0.05);
  }
}

TEST_CASE("parameter groups, their options and learning rates", "[optim]") {
  const auto parameters = make_parameters(torch::kDouble);
  const auto references = copies_of(parameters);
  const auto groups = [](const std::vector<torch::Tensor>& p) {
    return std::vector<OptimizerParamGroup>{
        {{p[0], p[1]}, std::make_unique<AdamWOptions>(AdamWOptions(1e-3).weight_decay(0.5))}, {{p[2], p[3]}}};
  };
  FusedAdamW ours(groups(parameters), AdamWOptions(1e-2));
  torch::optim::AdamW theirs(groups(references), AdamWOptions(1e-2));
  for (int step = 0; step < 20; ++step) {
    if (step == 5) {
      for (torch::optim::Optimizer* optimizer :
           {static_cast<torch::optim::Optimizer*>(&ours), static_cast<torch::optim::Optimizer*>(&theirs)}) {
        auto& options = optimizer->param_groups()[1].options();
        options.set_lr(options.get_lr() * 0.1);
      }
    }
    if (step == 10) {
      ours.add_param_group(OptimizerParamGroup({parameters[5]}));
      theirs.add_param_group(OptimizerParamGroup({references[5]}));
    }
    set_gradients(step, parameters, references);
    ours.step();
    theirs.step();
  }
  check_same(parameters, references, 1e-12);
  REQUIRE(flat_state(ours).size() == 3);
}

TEST_CASE("a scheduler of LibTorch's own drives a fused optimizer", "[optim]") {
  const auto train = [](auto&& make) {
    auto weight = torch::ones({3}).requires_grad_(true);
    auto optimizer = make(std::vector<torch::Tensor>{weight});
    torch::optim::StepLR scheduler(*optimizer, 1, 0.5);
    weight.mutable_grad() = torch::ones({3});
    for (int step = 0; step < 4; ++step) {
      optimizer->step();
      scheduler.step();
    }
    return weight[0].item<float>();
  };
  const SGDOptions options(1.0);
  CHECK(train([&](auto parameters) { return std::make_unique<FusedSGD>(parameters, options); }) ==
        train([&](auto parameters) { return std::make_unique<torch::optim::SGD>(parameters, options); }));
}

TEST_CASE("maximize goes up", "[optim]") {
  const auto parameters = make_parameters(torch::kDouble);
  const auto references = copies_of(parameters);
  FusedSGD ours(parameters, SGDOptions(0.1).momentum(0.9).weight_decay(0.1), {.maximize = true});
  torch::optim::SGD theirs(references, SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
  for (int step = 0; step < 5; ++step) {
    set_gradients(step, parameters, references);
    for (const auto& reference : references) {
      if (reference.grad().defined()) reference.mutable_grad() = -reference.grad();
    }
    ours.step();
    theirs.step();
  }
  check_same(parameters, references, 1e-12);
}

TEST_CASE("gradients can be scaled on the way, once", "[optim]") {
  auto weight = torch::zeros({4}).requires_grad_(true);
  weight.mutable_grad() = torch::full({4}, 8.0f);
  FusedSGD optimizer({weight}, SGDOptions(1.0));
  optimizer.step_scaled(0.125);
  CHECK(torch::equal(weight.detach(), torch::full({4}, -1.0f)));
  CHECK(torch::equal(weight.grad(), torch::full({4}, 8.0f)));
  optimizer.step();
  CHECK(torch::equal(weight.detach(), torch::full({4}, -9.0f)));
}

TEST_CASE("clip_grad_norm of a fused optimizer equals LibTorch's", "[optim]") {
  const auto parameters = make_parameters(torch::kDouble);
  const auto references = copies_of(parameters);
  FusedAdamW ours(parameters, AdamWOptions(1e-2));
  torch::optim::AdamW theirs(references, AdamWOptions(1e-2));
  for (int step = 0; step < 10; ++step) {
    set_gradients(step, parameters, references);
    const double expected = torch::nn::utils::clip_grad_norm_(references, step % 2 ? 1.0 : 1e6);
    CHECK(ours.clip_grad_norm(step % 2 ? 1.0 : 1e6) == Approx(expected).epsilon(1e-12));
    ours.step();
    theirs.step();
  }
  check_same(parameters, references, 1e-12);
}

TEST_CASE("clipping changes the gradients that it has seen, and no others", "[optim]") {
  auto weight = torch::zeros({4}).requires_grad_(true);
  FusedSGD optimizer({weight}, SGDOptions(1.0));
  torch::optim::Optimizer& base = optimizer;
  for (const float bad : {1e30f, NAN}) {
    weight.mutable_grad() = torch::full({4}, bad);
    optimizer.clip_grad_norm(1.0);  // The program skips step() because of the norm.
    base.zero_grad();               // Not virtual.
    weight.mutable_grad() = torch::full({4}, 0.25f);
    optimizer.step();
  }
  CHECK(torch::equal(weight.detach(), torch::full({4}, -0.5f)));
  weight.mutable_grad() = torch::full({4}, 8.0f);
  CHECK(optimizer.clip_grad_norm(1.0) == 16);
  weight.mutable_grad().add_(1);  // Noise on clipped gradients, or a further backward.
  optimizer.step();
  CHECK(torch::allclose(weight.detach(), torch::full({4}, -2.0f)));
}

TEST_CASE("a step notifies autograd of its write to the weights", "[optim]") {
  const auto check = [](const auto& make) {
    auto weight = torch::ones({3}).requires_grad_(true);
    auto strided = torch::ones({3, 2}).t().slice(0, 0, 1).detach().requires_grad_(true);
    auto optimizer = make(std::vector<torch::Tensor>{weight, strided});
    weight.mutable_grad() = torch::ones({3});
    strided.mutable_grad() = torch::ones_like(strided);
    auto loss = (weight * weight).sum();
    auto other = (strided * strided).sum();
    optimizer->step();
    CHECK_THROWS_WITH(loss.backward(), ContainsSubstring("modified by an inplace operation"));
    CHECK_THROWS_WITH(other.backward(), ContainsSubstring("modified by an inplace operation"));
    // A parameter without a gradient is not written.
    weight.mutable_grad().reset();
    loss = (weight * weight).sum();
    optimizer->step();
    loss.backward();
    // Clipping writes to gradients.
    auto of_gradient = (weight.grad() * torch::ones({3}).requires_grad_(true)).sum();
    optimizer->clip_grad_norm(0.1);
    CHECK_THROWS_WITH(of_gradient.backward(), ContainsSubstring("modified by an inplace operation"));
  };
  check([](auto parameters) { return std::make_unique<FusedAdamW>(parameters, AdamWOptions(0.1)); });
  check([](auto parameters) { return std::make_unique<FusedAdam>(parameters, AdamOptions(0.1)); });
  check([](auto parameters) { return std::make_unique<FusedSGD>(parameters, SGDOptions(0.1)); });
}

TEST_CASE("a weight under two names is one parameter", "[optim]") {
  auto a = torch::linspace(0.5, 2, 4).requires_grad_(true), b = torch::ones({3}).requires_grad_(true);
  const auto references = copies_of({a, b});
  FusedAdamW ours({a, b, a}, AdamWOptions(0.1));
  torch::optim::AdamW theirs(references, AdamWOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    set_gradients(step + 1, {a, b}, references);
    if (!a.grad().defined()) continue;
    CHECK(ours.clip_grad_norm(0.5) == Approx(torch::nn::utils::clip_grad_norm_(references, 0.5)));
    ours.step();
    theirs.step();
  }
  check_same({a, b}, references, 1e-5);
  CHECK(ours.param_groups()[0].params().size() == 2);
  // LibTorch's add_param_group keeps duplicates, and it is not virtual.
  auto c = torch::ones({2}).requires_grad_(true);
  c.mutable_grad() = torch::ones({2});
  ours.add_param_group(OptimizerParamGroup({c, c}));
  ours.step();
  CHECK(ours.param_groups()[1].params().size() == 1);
  CHECK(c[0].item<float>() == Approx(0.9 - 0.001));
  CHECK_THROWS_WITH(FusedAdamW({OptimizerParamGroup({a}), OptimizerParamGroup({b, a})}),
                    ContainsSubstring("parameter 1 of group 1") && ContainsSubstring("in an earlier parameter group"));
}

#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer does not see the synchronization of libgomp's threads.
TEST_CASE("bits do not depend on the number of threads", "[optim]") {
  const int before = at::get_num_threads();
  std::vector<std::vector<torch::Tensor>> results;
  for (const int threads : {1, 3}) {
    at::set_num_threads(threads);
    const auto parameters = make_parameters(torch::kFloat);
    std::vector<torch::Tensor> unused = copies_of(parameters);
    FusedAdamW adam(parameters, AdamWOptions(1e-2));
    for (int step = 0; step < 5; ++step) {
      set_gradients(step, parameters, unused);
      adam.clip_grad_norm(1.0);
      adam.step();
    }
    // Large enough for several threads.
    auto large = torch::linspace(-1, 1, 1 << 20).requires_grad_(true);
    large.mutable_grad() = torch::cos(large.detach() * 100);
    FusedSGD sgd({large}, SGDOptions(0.1).momentum(0.9));
    sgd.clip_grad_norm(1.0);
    sgd.step();
    sgd.step();
    results.push_back(parameters);
    results.back().push_back(large);
  }
  at::set_num_threads(before);
  for (std::size_t i = 0; i < results[0].size(); ++i) CHECK(torch::equal(results[0][i], results[1][i]));
}
#endif

TEST_CASE("the fused optimizers refuse unsupported parameters and options", "[optim]") {
  auto weight = torch::ones({3}).requires_grad_(true);
  FusedAdamW optimizer({weight});
  CHECK_THROWS_WITH(optimizer.step([] { return torch::zeros({}); }), ContainsSubstring("take no closure"));
  CHECK_FALSE(optimizer.step().defined());
  CHECK_THROWS_WITH(FusedAdamW({weight}, AdamWOptions(-1)), ContainsSubstring("lr -1"));
  CHECK_THROWS_WITH(FusedAdam({weight}, AdamOptions(1).betas({1.0, 0.9})), ContainsSubstring("betas 1 and 0.9"));
  CHECK_THROWS_WITH(FusedSGD({weight}, SGDOptions(0.1).nesterov(true)), ContainsSubstring("Nesterov"));
  std::vector<OptimizerParamGroup> wrong{{{weight}, std::make_unique<AdamOptions>(1e-3)}};
  CHECK_THROWS_WITH(FusedAdamW(wrong), ContainsSubstring("options of another optimizer"));
  auto complex = torch::ones({3}, torch::kComplexFloat).requires_grad_(true);
  FusedSGD of_complex({complex}, SGDOptions(0.1));
  CHECK_THROWS_WITH(of_complex.step(), ContainsSubstring("ComplexFloat [3] on cpu"));
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(5, 2).sparse(true));
  FusedSGD of_sparse(embedding->parameters(), SGDOptions(0.1));
  embedding(torch::tensor({1, 2})).sum().backward();
  CHECK_THROWS_WITH(of_sparse.step(), ContainsSubstring("sparse gradient"));
}
