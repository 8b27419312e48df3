// Against LibTorch's own optimizers, with the same parameters and gradients.
#include <torch/torch.h>

#include <sstream>

#include <ddpkit/comm/error.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>

#include "support/catch.h"

using ddpkit::optim::FusedAdam;
using ddpkit::optim::FusedAdamW;
using ddpkit::optim::FusedSGD;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

namespace {

/// Contiguous, transposed, channels-last, of one element, empty, several blocks long, and a part of a larger tensor.
std::vector<torch::Tensor> make_parameters(torch::ScalarType dtype) {
  torch::manual_seed(0);
  const auto values = [&](torch::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble).to(dtype); };
  std::vector<torch::Tensor> parameters{
      values({7, 5}),
      values({9, 4}).t(),
      values({2, 3, 4, 5}).contiguous(torch::MemoryFormat::ChannelsLast),
      values({}),
      values({0, 3}),
      values({50001}),
      values({6, 8}).slice(1, 1, 5),
  };
  for (auto& parameter : parameters) parameter.requires_grad_(true);
  return parameters;
}

/// The same values in the same layouts.
std::vector<torch::Tensor> copies_of(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> copies;
  for (const auto& parameter : parameters) {
    const torch::NoGradGuard no_grad;
    auto copy = torch::empty_strided(parameter.sizes(), parameter.strides(), parameter.options().requires_grad(false));
    copy.copy_(parameter);
    copies.push_back(copy.requires_grad_(true));
  }
  return copies;
}

/// New gradients for both; some parameters have none in some steps, some have them in another layout.
void set_gradients(int step, const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 + step));
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto gradient = (torch::randn(a[i].sizes(), torch::kDouble) + 0.3).to(a[i].scalar_type());
    if ((static_cast<std::size_t>(step) + i) % 5 == 0 || (i == 1 && step < 3)) {
      a[i].mutable_grad() = b[i].mutable_grad() = torch::Tensor();
      continue;
    }
    a[i].mutable_grad() = gradient;
    b[i].mutable_grad() = gradient.clone();
  }
}

double relative_difference(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.numel() == 0) return 0;
  const auto wide_a = a.detach().to(torch::kDouble), wide_b = b.detach().to(torch::kDouble);
  return ((wide_a - wide_b).abs().max() / wide_b.abs().max().clamp_min(1e-30)).item<double>();
}

void check_same(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b, double tolerance) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    INFO("parameter " << i);
    CHECK(relative_difference(a[i], b[i]) < tolerance);
  }
}

template <class Ours, class Theirs, class Options>
void check_against_libtorch(const Options& options) {
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    const auto parameters = make_parameters(dtype);
    const auto references = copies_of(parameters);
    Ours ours(parameters, options);
    Theirs theirs(references, options);
    for (int step = 0; step < 100; ++step) {
      set_gradients(step, parameters, references);
      ours.step();
      theirs.step();
    }
    check_same(parameters, references, dtype == torch::kDouble ? 1e-12 : 1e-6);
  }
}

template <class Optimizer>
std::string archive_of(const Optimizer& optimizer) {
  std::ostringstream stream;
  torch::save(optimizer, stream);
  return stream.str();
}

template <class Optimizer>
void load_archive(Optimizer& optimizer, const std::string& archive) {
  std::istringstream stream(archive);
  torch::load(optimizer, stream);
}

/// Trains one, moves its state into the other, and trains on with the other.
template <class First, class Second, class Options>
void check_archive(const Options& options) {
  const auto parameters = make_parameters(torch::kDouble);
  const auto references = copies_of(parameters);
  First first(parameters, options);
  Second throughout(references, options);
  for (int step = 0; step < 10; ++step) {
    set_gradients(step, parameters, references);
    first.step();
    throughout.step();
  }
  // Other options, and a step of its own: both must give way.
  Options other(0.5);
  const auto continued = copies_of(parameters);
  Second second(continued, other);
  set_gradients(0, continued, copies_of(continued));
  second.step();
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < continued.size(); ++i) continued[i].copy_(parameters[i]);
  }
  load_archive(second, archive_of(first));
  CHECK(static_cast<Options&>(second.param_groups()[0].options()) == options);
  for (int step = 10; step < 20; ++step) {
    set_gradients(step, continued, references);
    second.step();
    throughout.step();
  }
  check_same(continued, references, 1e-12);
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
    // One step, whose state is not rounded yet: what float32 gives, rounded once.
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
    REQUIRE(adam.flat_state()[0].tensors[0].scalar_type() == dtype);
    // And it goes down.
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
  REQUIRE(ours.flat_state().size() == 3);
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

TEST_CASE("the state is flat: one tensor for each kind, group, type and device", "[optim]") {
  auto a = torch::ones({3, 5}).requires_grad_(true), b = torch::ones({7}).requires_grad_(true);
  auto c = torch::ones({4}, torch::kDouble).requires_grad_(true);
  FusedAdamW optimizer({a, b, c}, AdamWOptions(0.1));
  CHECK(optimizer.flat_state().at(0).tensors.empty());
  for (const auto& parameter : {a, b, c}) parameter.mutable_grad() = torch::ones_like(parameter);
  optimizer.step();
  const auto& states = optimizer.flat_state();
  REQUIRE(states.size() == 2);
  CHECK(states[0].offsets == std::vector<std::int64_t>{0, 16});
  REQUIRE(states[0].tensors.size() == 2);
  CHECK(states[0].tensors[0].numel() == 32);
  CHECK(states[0].tensors[0].is_contiguous());
  CHECK(states[0].parameters[1].is_same(b));
  CHECK(states[1].dtype == torch::kDouble);
  const auto& state = static_cast<torch::optim::AdamWParamState&>(*optimizer.state()[b.unsafeGetTensorImpl()]);
  CHECK(state.step() == 1);
  CHECK(state.exp_avg().const_data_ptr<float>() == states[0].tensors[0].const_data_ptr<float>() + 16);
  CHECK(torch::allclose(state.exp_avg(), torch::full({7}, 0.1f)));
  CHECK(torch::equal(states[0].tensors[0].slice(0, 15, 16), torch::zeros({1})));
}

TEST_CASE("archives go from LibTorch's optimizers to ours and back", "[optim]") {
  const auto adamw = AdamWOptions(1e-2).amsgrad(true).weight_decay(0.2);
  check_archive<FusedAdamW, FusedAdamW>(adamw);
  check_archive<FusedAdamW, torch::optim::AdamW>(adamw);
  check_archive<torch::optim::AdamW, FusedAdamW>(adamw);
  const auto adam = AdamOptions(1e-2).weight_decay(0.2);
  check_archive<FusedAdam, torch::optim::Adam>(adam);
  check_archive<torch::optim::Adam, FusedAdam>(adam);
  for (const auto& sgd : {SGDOptions(1e-2).momentum(0.9), SGDOptions(1e-2)}) {
    check_archive<FusedSGD, FusedSGD>(sgd);
    check_archive<FusedSGD, torch::optim::SGD>(sgd);
    check_archive<torch::optim::SGD, FusedSGD>(sgd);
  }
}

TEST_CASE("an archive holds each tensor of the state once", "[optim]") {
  std::vector<torch::Tensor> parameters;
  for (int i = 0; i < 20; ++i) {
    parameters.push_back(torch::randn({1000}).requires_grad_(true));
    parameters.back().mutable_grad() = torch::randn({1000});
  }
  FusedAdamW optimizer(parameters);
  optimizer.step();
  CHECK(archive_of(optimizer).size() < 20 * 2 * 4000 * 2);
  // Saving leaves the state where it was.
  const auto& state =
      static_cast<torch::optim::AdamWParamState&>(*optimizer.state()[parameters[0].unsafeGetTensorImpl()]);
  CHECK(state.exp_avg().const_data_ptr() == optimizer.flat_state()[0].tensors[0].const_data_ptr());
}

TEST_CASE("an archive of another model is refused and changes nothing", "[optim]") {
  auto small = torch::ones({3}).requires_grad_(true), large = torch::ones({4}).requires_grad_(true);
  small.mutable_grad() = torch::ones({3});
  large.mutable_grad() = torch::ones({4});
  FusedAdamW of_small({small}, AdamWOptions(0.1)), of_large({large}, AdamWOptions(0.2));
  of_small.step();
  of_large.step();
  CHECK_THROWS_WITH(load_archive(of_large, archive_of(of_small)),
                    ContainsSubstring("is [3] where the parameter is [4]"));
  CHECK(of_large.param_groups()[0].options().get_lr() == 0.2);
  const auto before = large.detach().clone();
  of_large.step();
  CHECK_FALSE(torch::equal(large, before));
  CHECK(static_cast<torch::optim::AdamWParamState&>(*of_large.state()[large.unsafeGetTensorImpl()]).step() == 2);
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
  optimizer.scale_gradients(0.5);
  optimizer.scale_gradients(0.25);
  optimizer.step();
  CHECK(torch::equal(weight.detach(), torch::full({4}, -1.0f)));
  CHECK(torch::equal(weight.grad(), torch::full({4}, 8.0f)));
  optimizer.step();
  CHECK(torch::equal(weight.detach(), torch::full({4}, -9.0f)));
}

TEST_CASE("clipping in the update's own pass equals clipping before it", "[optim]") {
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
  ours.scale_gradients(0.5);
  CHECK(ours.clip_grad_norm(1e6) == Approx(0.5 * ddpkit::optim::grad_norm(parameters)).epsilon(1e-12));
}

#if !defined(__SANITIZE_THREAD__)  // Which does not see how libgomp's threads are sent to work and waited for.
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

TEST_CASE("state follows a model that moves to another type", "[optim]") {
  torch::nn::Linear model(3, 2);
  FusedSGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
  model->forward(torch::ones({1, 3})).sum().backward();
  optimizer.step();
  model->to(torch::kDouble);
  model->zero_grad();
  model->forward(torch::ones({1, 3}, torch::kDouble)).sum().backward();
  const auto before = model->bias.detach().clone();
  optimizer.step();
  CHECK(optimizer.flat_state()[0].dtype == torch::kDouble);
  // Gradients of 1: the second step has momentum.
  CHECK(torch::allclose(before - model->bias.detach(), torch::full({2}, 0.19, torch::kDouble)));
}

TEST_CASE("what the fused optimizers refuse", "[optim]") {
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
