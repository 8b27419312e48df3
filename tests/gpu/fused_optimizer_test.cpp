#include <torch/torch.h>

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>

#include "gpu/gpu.h"

namespace {

using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

std::vector<torch::Tensor> parameters_on_gpu() {
  torch::manual_seed(0);
  std::vector<torch::Tensor> parameters;
  for (const auto& tensor : {torch::randn({7, 5}), torch::randn({9, 4}).t(), torch::randn({50001})})
    parameters.push_back(tensor.to(torch::kCUDA).requires_grad_(true));
  return parameters;
}

template <class Ours, class Theirs, class Options>
void check_against_libtorch(const Options& options) {
  const auto parameters = parameters_on_gpu(), references = parameters_on_gpu();
  Ours ours(parameters, options);
  Theirs theirs(references, options);
  for (int step = 0; step < 100; ++step) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto gradient = torch::randn_like(parameters[i]);
      const bool none = (static_cast<std::size_t>(step) + i) % 5 == 0;
      parameters[i].mutable_grad() = none ? torch::Tensor() : gradient;
      references[i].mutable_grad() = none ? torch::Tensor() : gradient.clone();
    }
    if (step % 3 == 0) {
      ours.clip_grad_norm(1.0);
      torch::nn::utils::clip_grad_norm_(references, 1.0);
    }
    ours.step();
    theirs.step();
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto difference = (parameters[i] - references[i]).abs().max() / references[i].abs().max();
    CHECK(difference.template item<double>() < 1e-5);
  }
}

}  // namespace

TEST_CASE("fused optimizers on a GPU equal LibTorch's", "[gpu][optim]") {
  NEEDS_GPU();
  check_against_libtorch<ddpkit::optim::FusedAdamW, torch::optim::AdamW>(AdamWOptions(1e-2).weight_decay(0.1));
  check_against_libtorch<ddpkit::optim::FusedAdamW, torch::optim::AdamW>(AdamWOptions(1e-2).amsgrad(true));
  check_against_libtorch<ddpkit::optim::FusedAdam, torch::optim::Adam>(AdamOptions(1e-2).weight_decay(0.1));
  check_against_libtorch<ddpkit::optim::FusedSGD, torch::optim::SGD>(SGDOptions(1e-2).weight_decay(0.1));
  check_against_libtorch<ddpkit::optim::FusedSGD, torch::optim::SGD>(SGDOptions(1e-2).momentum(0.9).nesterov(true));
}

TEST_CASE("master weights on a GPU are those of a float32 run", "[gpu][optim][master]") {
  NEEDS_GPU();
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    torch::manual_seed(0);
    auto parameter = torch::randn({5001}).to(torch::kCUDA).to(dtype).requires_grad_(true);
    auto reference = parameter.detach().to(torch::kFloat).requires_grad_(true);
    ddpkit::optim::FusedAdamW ours({parameter}, AdamWOptions(1e-2), {.master_weights = true});
    ddpkit::optim::FusedAdamW theirs({reference}, AdamWOptions(1e-2));
    for (int step = 0; step < 20; ++step) {
      parameter.mutable_grad() = torch::randn_like(parameter);
      reference.mutable_grad() = parameter.grad().to(torch::kFloat);
      ours.step();
      theirs.step();
      CHECK(torch::equal(parameter, reference.to(dtype)));
    }
    {
      const torch::NoGradGuard no_grad;
      parameter.fill_(2);
    }
    ours.step();
    CHECK(parameter.sub(2).abs().max().item<double>() < 0.1);
  }
}
