// Where DistributedDataParallel stores gradients, and who owns them for how long: separate tensors, views of buckets,
// and the arena.
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <ddpkit/parallel/distributed_data_parallel.h>

#include "ranks/branches.h"
#include "ranks/comparisons.h"
#include "ranks/many_kinds.h"
#include "support/catch.h"
#include "support/ranks.h"

using namespace ddpkit::testing;
using ddpkit::DistributedDataParallel;
using ddpkit::ProcessGroup;

RANK_TEST(
    "gradient_as_bucket_view: gradients alias memory that is kept from "
    "step to step",
    "[ddp]", 2, 3) {
  auto model = many_kinds(0);
  DistributedDataParallel ddp(model, group, {.gradient_as_bucket_view = true, .arena = false});
  const auto backward = [&](int step) {
    const Batch batch = joined_batch(step).part(group.rank(), group.world_size());
    loss_of(ddp(batch.data), batch).backward();
  };
  backward(0);
  std::vector<void*> addresses;
  for (const auto& parameter : unique_parameters(*model)) {
    addresses.push_back(parameter.grad().data_ptr());
    CHECK(parameter.grad().storage().data() == unique_parameters(*model)[0].grad().storage().data());
    CHECK_FALSE(parameter.grad().is_view());
  }
  for (const bool set_to_none : {true, false}) {
    make_optimizer("sgd", unique_parameters(*model))->zero_grad(set_to_none);
    backward(1);
    for (std::size_t i = 0; i < addresses.size(); ++i)
      CHECK(unique_parameters(*model)[i].grad().data_ptr() == addresses[i]);
  }
}

RANK_TEST("without gradient_as_bucket_view each gradient is a separate tensor", "[ddp]", 2, 3) {
  auto model = many_kinds(0);
  DistributedDataParallel ddp(model, group, {.arena = false});
  const auto backward = [&](int step) {
    const Batch batch = joined_batch(step).part(group.rank(), group.world_size());
    loss_of(ddp(batch.data), batch).backward();
  };
  backward(0);
  std::vector<torch::Tensor> held;
  std::vector<torch::Tensor> values;
  for (const auto& parameter : unique_parameters(*model)) {
    held.push_back(parameter.grad());
    values.push_back(parameter.grad().clone());
  }
  make_optimizer("sgd", unique_parameters(*model))->zero_grad(true);
  backward(1);
  // Gradients that a caller kept from an earlier step do not change.
  for (std::size_t i = 0; i < held.size(); ++i) CHECK(torch::equal(held[i], values[i]));
}

namespace {

/// Autograd passes the same tensor to `offset` as its gradient and to the function that computes the gradient of
/// `weight`.
struct SharedGradientImpl : torch::nn::Module {
  SharedGradientImpl() {
    weight = register_parameter("weight", torch::linspace(0.1, 1, 1024, torch::kDouble));
    offset = register_parameter("offset", torch::linspace(1, 2, 1024, torch::kDouble));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor product = weight.view({1, -1}) * x;
    if (between) product.register_hook([this](const torch::Tensor&) { between(); });
    return product + offset.view({1, -1});
  }
  torch::Tensor weight, offset;
  std::function<void()> between;
};

}  // namespace

RANK_TEST("a gradient is not reduced where backward still reads it", "[ddp]", 2, 3) {
  for (const bool arena : {true, false}) {
    for (const bool as_view : {true, false}) {
      const auto model = std::make_shared<SharedGradientImpl>();
      // Each parameter has a separate bucket; the bucket of `offset` is first.
      DistributedDataParallel ddp(
          model, group,
          {.bucket_cap_mb = 0.001, .first_bucket_cap_mb = 0.001, .gradient_as_bucket_view = as_view, .arena = arena});
      model->between = [&group] { group.barrier(); };  // The first bucket has been reduced when it returns.
      const auto x = [](int rank) { return torch::full({1, 1024}, 1.0 + rank, torch::kDouble); };
      torch::Tensor of_weight = torch::zeros(1024, torch::kDouble), of_offset = of_weight.clone();
      for (int r = 0; r < group.world_size(); ++r) {
        const torch::NoGradGuard no_grad;
        const torch::Tensor twice = 2 * (model->weight * x(r)[0] + model->offset);
        of_offset += twice / group.world_size();
        of_weight += twice * x(r)[0] / group.world_size();
      }
      for (int step = 0; step < 2; ++step) {
        model->zero_grad();
        ddp(x(group.rank())).square().sum().backward();
        INFO("arena " << arena << ", gradient_as_bucket_view " << as_view << ", step " << step);
        CHECK(largest_difference(model->offset.grad(), of_offset) < 1e-10);
        CHECK(largest_difference(model->weight.grad(), of_weight) < 1e-10);
      }
    }
  }
}

namespace {

/// Weights under two names, or used in two places. Autograd adds the products' gradients before it accumulates them.
struct TwiceImpl : torch::nn::Module {
  TwiceImpl() {
    weight = register_parameter("weight", torch::randn({64, 64}) / 8);
    register_parameter("again", weight);
    into = register_module("into", torch::nn::Linear(64, 64));
  }
  torch::Tensor forward(const torch::Tensor& x) { return into(torch::tanh(into(x).matmul(weight))).matmul(weight.t()); }
  torch::Tensor weight;
  torch::nn::Linear into{nullptr};
};

/// Returns the number of arena blocks that a backward takes, minus those of a backward that reduces nothing.
template <class M>
std::uint64_t blocks_for_copies(const std::shared_ptr<M>& model, const ProcessGroup& group, const torch::Tensor& x,
                                bool accumulates) {
  DistributedDataParallel ddp(model, group);
  const auto blocks_taken = [&](bool synchronize) {
    if (!accumulates) model->zero_grad();
    const torch::Tensor loss = ddp(x).square().sum();
    const auto before = ddp.reducer().arena().value().allocations;
    if (synchronize) {
      loss.backward();
    } else {
      const auto local = ddp.no_sync();
      loss.backward();
    }
    return ddp.reducer().arena().value().allocations - before;
  };
  blocks_taken(true);  // The first backward makes a new plan of buckets.
  const auto with = blocks_taken(true);
  return with - blocks_taken(false);
}

}  // namespace

RANK_TEST("gradients that are a parameter's alone are not copied", "[ddp]", 1, 2) {
  for (const bool accumulates : {false, true}) {
    CAPTURE(accumulates);
    const auto mlp = std::make_shared<torch::nn::SequentialImpl>(
        torch::nn::Linear(64, 2048), torch::nn::ReLU(), torch::nn::LayerNorm(torch::nn::LayerNormOptions({2048})),
        torch::nn::Linear(2048, 1024));
    CHECK(blocks_for_copies(mlp, group, torch::randn({8, 64}), accumulates) == 0);
    const auto convolutions = std::make_shared<torch::nn::SequentialImpl>(
        torch::nn::Conv2d(3, 64, 5), torch::nn::BatchNorm2d(64), torch::nn::Conv2d(64, 32, 3));
    CHECK(blocks_for_copies(convolutions, group, torch::randn({2, 3, 12, 12}), accumulates) == 0);
    CHECK(blocks_for_copies(std::make_shared<TwiceImpl>(), group, torch::randn({8, 64}), accumulates) == 0);
  }
}

namespace {

/// A model whose gradient is linear in its input.
std::shared_ptr<torch::nn::LinearImpl> linear_model() {
  return std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(1024, 8).bias(false));
}

/// Returns the gradients that `backward_of` gives for a factor of 1; all elements differ.
torch::Tensor unit_gradient() {
  return torch::outer(torch::arange(1, 9).to(torch::kFloat), torch::linspace(0.5, 1, 1024));
}

void backward_of(DistributedDataParallel<torch::nn::LinearImpl>& ddp, double factor) {
  (ddp(factor * torch::linspace(0.5, 1, 1024).unsqueeze(0)) * torch::arange(1, 9)).sum().backward();
}

void check_average(DistributedDataParallel<torch::nn::LinearImpl>& ddp, const ProcessGroup& group) {
  const double rank = group.rank(), ranks = group.world_size();
  backward_of(ddp, 1.0 + rank);
  CHECK(largest_difference(ddp.module().weight.grad(), unit_gradient() * ((ranks + 1) / 2)) < 1e-5);
}

}  // namespace

RANK_TEST("ranks release a wrapped model at different times", "[ddp]", 2, 3) {
  const auto first_model = linear_model(), second_model = linear_model();
  using Wrapped = DistributedDataParallel<torch::nn::LinearImpl>;
  auto first = std::make_unique<Wrapped>(first_model, group);
  check_average(*first, group);
  if (group.rank() == 1) first.reset();
  auto second = std::make_unique<Wrapped>(second_model, group);
  check_average(*second, group);
  first.reset();
  second_model->zero_grad();
  check_average(*second, group);
  second.reset();
  second_model->zero_grad();
  // All ranks have released both models, so a new arena is possible.
  Wrapped third(second_model, group);
  CHECK(third.reducer().arena());
  check_average(third, group);
}

RANK_TEST("a gradient from an arena that another rank no longer maps", "[ddp]", 2) {
  const auto model = linear_model();
  using Wrapped = DistributedDataParallel<torch::nn::LinearImpl>;
  auto first = std::make_unique<Wrapped>(model, group);
  check_average(*first, group);
  first.reset();
  if (group.rank() == 1) model->zero_grad();  // Rank 0's gradient stays in the first arena and accumulates.
  Wrapped second(model, group, {.arena = false});
  backward_of(second, 1);
  CHECK(largest_difference(model->weight.grad(), unit_gradient() * (1.0 + 1.5 / 2)) < 1e-5);
}

RANK_TEST("the arena: gradients are reduced where autograd makes them", "[ddp][options][arena]", 2, 3) {
  Branches model;
  torch::Tensor outlives;
  {
    DistributedDataParallel ddp(model, group);
    REQUIRE(ddp.reducer().arena());
    ddp(input(0, group.rank()), "lr").sum().backward();
    const auto stats = ddp.reducer().arena().value();
    CHECK(stats.in_use >= 3 * kWidth * kWidth * sizeof(double));
    CHECK(stats.peak >= stats.in_use);
    CHECK(stats.reserved <= stats.capacity);
    CHECK(stats.allocations > 0);
    // In the steady state, no step takes more memory from the system.
    for (std::int64_t step = 1; step < 20; ++step) {
      forget_gradients(*model);
      ddp(input(step, group.rank()), "lr").sum().backward();
    }
    CHECK(ddp.reducer().arena()->reserved == stats.reserved);
    outlives = model->trunk->weight.grad();
  }
  const torch::Tensor copy = outlives.clone();
  torch::randn({300, 300}).matmul(torch::randn({300, 300}));
  CHECK(torch::equal(outlives, copy));
}

RANK_TEST("gradients that lie otherwise on one rank are averaged element by element", "[ddp][options][arena]", 2, 3) {
  Branches model, reference;
  DistributedDataParallel ddp(model, group);
  REQUIRE(ddp.reducer().arena());
  // Autograd accumulates in place.
  if (group.rank() == 1) {
    for (const auto& layer : {model->trunk, model->left, model->right})
      layer->weight.mutable_grad() = torch::empty_strided({kWidth, kWidth}, {1, kWidth}, torch::kDouble).zero_();
  }
  const auto expected = expected_gradients(*reference, group.world_size(),
                                           [&](int r) { return reference(input(0, r), "lr").pow(2).mean(); });
  ddp(input(0, group.rank()), "lr").pow(2).mean().backward();
  CHECK((model->trunk->weight.grad().stride(0) == 1) == (group.rank() == 1));
  check_gradients(*model, expected, group);
}

RANK_TEST("the arena can be switched off, and a full one is only slower", "[ddp][options][arena]", 2, 3) {
  Branches off;
  DistributedDataParallel without(off, group, {.arena = false});
  CHECK_FALSE(without.reducer().arena());
  Branches model, reference;
  // The arena has room for the gradients only: all other allocations find it full.
  DistributedDataParallel ddp(model, group, {.arena_mb = 0.001});
  REQUIRE(ddp.reducer().arena());
  std::vector<torch::Tensor> hoard;
  for (int i = 0; i < 100; ++i) hoard.push_back(torch::zeros({kWidth, kWidth}, torch::kDouble));
  CHECK(ddp.reducer().arena()->refused > 0);
  const auto expected = expected_gradients(*reference, group.world_size(),
                                           [&](int r) { return reference(input(0, r), "lr").pow(2).mean(); });
  ddp(input(0, group.rank()), "lr").pow(2).mean().backward();
  check_gradients(*model, expected, group);
  CHECK(ddp.reducer().arena()->in_use <= ddp.reducer().arena()->capacity);
}

RANK_TEST("two models on one group share an arena", "[ddp][options][arena]", 2, 3) {
  Branches first(1), second(2), first_alone(1), second_alone(2);
  DistributedDataParallel a(first, group), b(second, group);
  const auto loss = [](auto& x, auto& y, int r) { return x(y(input(0, r), "lr"), "lr").pow(2).mean(); };
  torch::Tensor joined = torch::zeros({}, torch::kDouble);
  for (int r = 0; r < group.world_size(); ++r)
    joined = joined + loss(first_alone, second_alone, r) / group.world_size();
  joined.backward();
  loss(a, b, group.rank()).backward();
  for (const auto& [model, alone] : {std::pair(first, first_alone), std::pair(second, second_alone)}) {
    for (std::size_t i = 0; i < model->parameters().size(); ++i)
      CHECK(at::allclose(model->parameters()[i].grad(), alone->parameters()[i].grad(), 0, 1e-12));
  }
}
