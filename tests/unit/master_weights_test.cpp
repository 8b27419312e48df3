#include <torch/torch.h>

#include <sstream>

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>

#include "support/catch.h"
#include "unit/optimizer_parameters.h"

using ddpkit::optim::FusedAdam;
using ddpkit::optim::FusedAdamW;
using ddpkit::optim::FusedSGD;
using ddpkit::testing::flat_state;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

namespace {

/// Contiguous, transposed, several blocks long, a part of a larger tensor, and a float32 one.
std::vector<torch::Tensor> make_parameters(torch::ScalarType dtype) {
  torch::manual_seed(0);
  std::vector<torch::Tensor> parameters{torch::randn({7, 5}).to(dtype), torch::randn({9, 4}).to(dtype).t(),
                                        torch::randn({40001}).to(dtype), torch::randn({6, 8}).to(dtype).slice(1, 1, 5),
                                        torch::randn({5})};
  for (auto& parameter : parameters) parameter.requires_grad_(true);
  return parameters;
}

std::vector<torch::Tensor> in_float(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> copies;
  for (const auto& parameter : parameters)
    copies.push_back(parameter.detach().to(torch::kFloat, /*non_blocking=*/false, /*copy=*/true).requires_grad_(true));
  return copies;
}

void set_gradients(int step, const std::vector<torch::Tensor>& parameters,
                   const std::vector<torch::Tensor>& references) {
  torch::manual_seed(static_cast<std::uint64_t>(100 + step));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto gradient = torch::randn(parameters[i].sizes()).to(parameters[i].scalar_type());
    const bool none = (static_cast<std::size_t>(step) + i) % 4 == 0;
    parameters[i].mutable_grad() = none ? torch::Tensor() : gradient;
    references[i].mutable_grad() = none ? torch::Tensor() : gradient.to(torch::kFloat);
  }
}

void check_rounded(const std::vector<torch::Tensor>& parameters, const std::vector<torch::Tensor>& references) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    INFO("parameter " << i);
    CHECK(torch::equal(parameters[i], references[i].to(parameters[i].scalar_type())));
  }
}

/// Checks that weights equal, bit for bit, a float32 run whose weights are rounded after each step.
template <class Optimizer, class Options>
void check_against_float(const Options& options) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const auto parameters = make_parameters(dtype), references = in_float(parameters);
    Optimizer ours(parameters, options, {.master_weights = true}), theirs(references, options);
    for (int step = 0; step < 30; ++step) {
      set_gradients(step, parameters, references);
      ours.step();
      theirs.step();
      check_rounded(parameters, references);
    }
    for (const auto& flat : flat_state(ours)) {
      CHECK(flat.master.defined() == (flat.dtype != torch::kFloat));
      for (const auto& tensor : flat.tensors) CHECK(tensor.scalar_type() == torch::kFloat);
    }
  }
}

template <class From, class To>
void copy_archive(const From& from, To& to) {
  std::stringstream stream;
  torch::save(from, stream);
  torch::load(to, stream);
}

}  // namespace

TEST_CASE("master weights: half types train as float32, rounded each step", "[optim][master]") {
  check_against_float<FusedAdamW>(AdamWOptions(1e-2).weight_decay(0.1));
  check_against_float<FusedAdamW>(AdamWOptions(1e-2).amsgrad(true));
  check_against_float<FusedAdam>(AdamOptions(1e-2).weight_decay(0.1));
  check_against_float<FusedSGD>(SGDOptions(1e-2).weight_decay(0.1));
  check_against_float<FusedSGD>(SGDOptions(1e-2).momentum(0.9).dampening(0.1));
  check_against_float<FusedSGD>(SGDOptions(1e-2).momentum(0.9).nesterov(true));
}

TEST_CASE("master weights: steps below a half type's rounding add up", "[optim][master]") {
  for (const bool master : {false, true}) {
    auto weight = torch::ones({10}, torch::kBFloat16).requires_grad_(true);
    FusedSGD optimizer({weight}, SGDOptions(1e-3), {.master_weights = master});
    for (int step = 0; step < 500; ++step) {
      weight.mutable_grad() = torch::ones({10}, torch::kBFloat16);
      optimizer.step();
    }
    CHECK(weight[0].item<float>() == (master ? 0.5f : 1.0f));
  }
}

TEST_CASE("master weights follow what is written to a parameter", "[optim][master]") {
  auto weight = torch::ones({4}, torch::kBFloat16).requires_grad_(true);
  FusedSGD optimizer({weight}, SGDOptions(0.25), {.master_weights = true});
  weight.mutable_grad() = torch::ones({4}, torch::kBFloat16);
  optimizer.step();
  CHECK(weight[0].item<float>() == 0.75);
  {
    const torch::NoGradGuard no_grad;
    weight[1] = 8;
    weight[2] = -0.0;
  }
  optimizer.step();
  CHECK(torch::equal(weight.detach().to(torch::kFloat), torch::tensor({0.5, 7.75, -0.25, 0.5})));
}

TEST_CASE("master weights are in archives, which others read and need not have", "[optim][master]") {
  const auto options = AdamWOptions(1e-2);
  const auto parameters = make_parameters(torch::kBFloat16), references = in_float(parameters);
  FusedAdamW first(parameters, options, {.master_weights = true}), throughout(references, options);
  const auto both = [&](int step, auto& ours, const auto& its) {
    set_gradients(step, its, references);
    ours.step();
    throughout.step();
  };
  for (int step = 0; step < 10; ++step) both(step, first, parameters);
  // The copy must include the low bits; otherwise training diverges from the float32 run.
  std::vector<torch::Tensor> copies;
  for (const auto& parameter : parameters) copies.push_back(parameter.detach().clone().requires_grad_(true));
  FusedAdamW second(copies, AdamWOptions(0.5), {.master_weights = true});
  copy_archive(first, second);
  for (int step = 10; step < 20; ++step) both(step, second, copies);
  check_rounded(copies, references);

  // LibTorch's optimizer and an optimizer without master weights read the archive, and the reverse.
  torch::optim::AdamW plain(copies, options);
  copy_archive(second, plain);
  set_gradients(20, copies, references);
  plain.step();
  FusedAdamW without(copies, options);
  copy_archive(second, without);
  without.step();
  CHECK_FALSE(flat_state(without).at(0).master.defined());
  CHECK(flat_state(without).at(0).tensors.at(0).scalar_type() == torch::kBFloat16);
  FusedAdamW with(copies, options, {.master_weights = true});
  copy_archive(without, with);
  with.step();
  CHECK(flat_state(with).at(0).tensors.at(0).scalar_type() == torch::kFloat);
}
