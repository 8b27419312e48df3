// DataParallel's gradients equal those of one device on the joined batch.
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <optional>

#include <ddpkit/error.h>
#include <ddpkit/parallel/data_parallel.h>

#include "support/catch.h"
#include "unit/data_parallel_net.h"

using namespace ddpkit::testing;
using ddpkit::DataParallel;
using ddpkit::InvalidArgument;
using torch::Tensor;

TEST_CASE("DataParallel's gradients are those of the joined batch", "[dp]") {
  for (const int replicas : {1, 2, 3, 4}) {
    for (const std::int64_t samples : {1, 2, 3, 5, 8, 13}) {
      INFO(replicas << " replicas, " << samples << " samples");
      const Tensor batch = batch_of(samples);
      auto reference = make_net();
      const Tensor wanted = reference->forward(batch);
      loss_of(wanted).backward();

      auto gathered = make_net();
      DataParallel dp(gathered, {.replicas = replicas});
      const Tensor output = dp(batch);
      CHECK(at::allclose(output, wanted, 0, kTolerance));
      loss_of(output).backward();
      check_same_gradients(gathered, reference);

      for (const double cap : {25., 0.001}) {
        auto stepped = make_net();
        DataParallel step(stepped, {.replicas = replicas, .bucket_cap_mb = cap, .first_bucket_cap_mb = cap});
        CHECK((step.buckets().size() > 1) == (cap < 1));
        const Tensor loss = step.train_step(batch, kStepLoss);
        CHECK(loss.item<double>() == Approx(loss_of(wanted).item<double>()).epsilon(1e-12));
        CHECK_FALSE(loss.requires_grad());
        check_same_gradients(stepped, reference);
        // Accumulates into existing gradients.
        step.train_step(batch, kStepLoss);
        for (const Tensor& parameter : reference->parameters()) {
          if (parameter.grad().defined()) parameter.mutable_grad() = parameter.grad() * 2;
        }
        check_same_gradients(stepped, reference);
        for (const Tensor& parameter : reference->parameters()) {
          if (parameter.grad().defined()) parameter.mutable_grad() = parameter.grad() / 2;
        }
      }
    }
  }
}

TEST_CASE("DataParallel's large gradients are summed in pieces", "[dp]") {
  const auto make = [] {
    torch::manual_seed(7);
    torch::nn::Sequential net(torch::nn::Linear(6, 700), torch::nn::Tanh(), torch::nn::Linear(700, 701));
    return net;
  };
  for (const auto dtype : {torch::kDouble, torch::kBFloat16}) {
    auto reference = make();
    reference->to(dtype);
    auto net = make();
    net->to(dtype);
    const Tensor batch = batch_of(6).to(dtype);
    // The sum over replicas, in order, of each replica's gradient.
    for (int r = 0; r < 3; ++r) (loss_of(reference->forward(batch.slice(0, 2 * r, 2 * r + 2))) / 3).backward();
    DataParallel dp(net, {.replicas = 3});
    dp.train_step(batch, kStepLoss);
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      const Tensor wanted = reference->parameters()[i].grad().to(torch::kDouble);
      const Tensor error = net->parameters()[i].grad().to(torch::kDouble) - wanted;
      // Relative, because the gradients are small. bfloat16 has 8 bits, and each of three sums is rounded.
      const double tolerance = dtype == torch::kDouble ? 1e-12 : 0.01;
      CHECK(error.norm().item<double>() < tolerance * wanted.norm().item<double>());
      CHECK(error.abs().max().item<double>() < 3 * tolerance * wanted.abs().max().item<double>());
    }
  }
}

TEST_CASE("DataParallel gives autograd::grad, inputs' gradients and a kept graph", "[dp]") {
  auto reference = make_net();
  auto net = make_net();
  DataParallel dp(net, {.replicas = 3});
  const Tensor x = batch_of(7).requires_grad_();
  const Tensor y = x.detach().clone().requires_grad_();
  const Tensor wanted = loss_of(reference->forward(x * 2));
  const Tensor loss = loss_of(dp(y * 2));
  const auto wanted_grads = torch::autograd::grad({wanted}, {x, reference->first->weight}, {}, true);
  const auto grads = torch::autograd::grad({loss}, {y, net->first->weight}, {}, true);
  for (std::size_t i = 0; i < 2; ++i) CHECK(at::allclose(grads[i], wanted_grads[i], 0, kTolerance));
  CHECK_FALSE(net->first->weight.grad().defined());
  wanted.backward();
  loss.backward();
  check_same_gradients(net, reference);
  CHECK(at::allclose(y.grad(), x.grad(), 0, kTolerance));
  CHECK_THROWS_WITH(loss.backward(), ContainsSubstring("second") || ContainsSubstring("retain_graph"));
  CHECK_THROWS_WITH(loss_of(dp(y)).backward({}, std::nullopt, /*create_graph=*/true),
                    ContainsSubstring("create_graph"));
  // Two forwards, one backward.
  reference->zero_grad();
  net->zero_grad();
  (loss_of(reference->forward(x)) + loss_of(reference->forward(x * 3))).backward();
  (loss_of(dp(y)) + loss_of(dp(y * 3))).backward();
  check_same_gradients(net, reference);
}

TEST_CASE("DataParallel sums gradients that are one piece of memory once each", "[dp]") {
  // Autograd passes the same memory as the gradient of both.
  struct SharedImpl : torch::nn::Cloneable<SharedImpl> {
    SharedImpl() { reset(); }  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall)
    void reset() override {
      a = register_parameter("a", torch::arange(6, torch::kDouble).view({2, 3}));
      b = register_parameter("b", torch::ones({3, 2}, torch::kDouble));
    }
    Tensor forward(const Tensor& x) { return x * (a.view({-1}) + b.view({-1})); }
    Tensor a, b;
  };
  const auto net = std::make_shared<SharedImpl>();
  DataParallel dp(net, {.replicas = 3});
  const Tensor batch = batch_of(7);
  const Tensor expected = batch.sum(0);
  for (const bool gathers : {false, true}) {
    net->zero_grad();
    if (gathers) {
      dp(batch).sum().backward();
    } else {
      dp.train_step(batch, [](SharedImpl& replica, const Tensor& part) {
        return replica.forward(part).sum() / static_cast<double>(part.size(0));
      });
    }
    const double scale = gathers ? 1 : 7;
    CHECK(at::allclose(net->a.grad().view({-1}) * scale, expected, 0, kTolerance));
    CHECK(at::allclose(net->b.grad().view({-1}) * scale, expected, 0, kTolerance));
  }
}

TEST_CASE("DataParallel with tied weights, sparse gradients and unused parameters", "[dp]") {
  struct TiedImpl : torch::nn::Cloneable<TiedImpl> {
    TiedImpl() { reset(); }  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall)
    void reset() override {
      embedding = register_module("embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 4).sparse(true)));
      weight = register_parameter("weight", torch::randn({4, 4}));
      tied = register_parameter("tied", weight);
      sometimes = register_module("sometimes", torch::nn::Linear(4, 4));
    }
    Tensor forward(const Tensor& x) {
      const Tensor hidden = torch::tanh(embedding(x).matmul(weight)).matmul(tied);
      return (x == 8).any().item<bool>() ? sometimes(hidden) : hidden;
    }
    torch::nn::Embedding embedding{nullptr};
    Tensor weight, tied;
    torch::nn::Linear sometimes{nullptr};
  };
  const auto make = [] {
    torch::manual_seed(4);
    auto net = std::make_shared<TiedImpl>();
    net->to(torch::kDouble);
    return net;
  };
  const auto alone = make();
  const auto net = make();
  DataParallel dp(net, {.replicas = 3, .bucket_cap_mb = 0.0001, .first_bucket_cap_mb = 0.0001});
  // No replica, one replica, or all replicas but one use `sometimes`.
  for (const auto& batch : {torch::tensor({1, 2, 3}), torch::tensor({1, 8, 3}), torch::tensor({8, 8, 1})}) {
    alone->zero_grad();
    Tensor wanted;
    for (int r = 0; r < 3; ++r) {
      const Tensor part = loss_of(alone->forward(batch.narrow(0, r, 1))) / 3;
      part.backward();
      wanted = wanted.defined() ? wanted + part : part;
    }
    for (const bool gathers : {false, true}) {
      net->zero_grad();
      const Tensor loss = gathers ? loss_of(dp(batch)) : dp.train_step(batch, kStepLoss);
      if (gathers) loss.backward();
      CHECK(loss.item<double>() == Approx(wanted.item<double>()).epsilon(1e-12));
      for (const auto& item : alone->named_parameters()) {
        INFO(item.key());
        const Tensor grad = net->named_parameters()[item.key()].grad();
        REQUIRE(grad.defined() == item.value().grad().defined());
        if (grad.defined()) CHECK(at::allclose(grad.to_dense(), item.value().grad().to_dense(), 0, kTolerance));
      }
    }
  }
}

TEST_CASE("DataParallel without gradients", "[dp]") {
  auto net = make_net();
  DataParallel dp(net, {.replicas = 2});
  const Tensor batch = batch_of(5);
  const Tensor wanted = net->forward(batch).detach();
  {
    const torch::NoGradGuard no_grad;
    const Tensor output = dp(batch);
    CHECK_FALSE(output.requires_grad());
    CHECK(at::allclose(output, wanted, 0, kTolerance));
    CHECK_THROWS_AS(dp.train_step(batch, kStepLoss), InvalidArgument);
  }
  {
    const c10::InferenceMode inference;
    CHECK(at::allclose(dp(batch), wanted, 0, kTolerance));
  }
  CHECK(dp(batch).requires_grad());
  CHECK(dp(batch_of(0)).sizes() == at::IntArrayRef({0, 3}));
}

namespace {

/// Passes nothing to its input: the gradient is undefined, not zero.
struct Stop : torch::autograd::Function<Stop> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& input) { return input.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    return {Tensor()};
  }
};

struct StoppedImpl : torch::nn::Cloneable<StoppedImpl> {
  StoppedImpl() { reset(); }
  void reset() override {
    torch::manual_seed(1);
    through = register_parameter("through", torch::randn({3}));
    stopped = register_parameter("stopped", torch::randn({3}));
  }
  Tensor forward(const Tensor& x) { return x * through + x * Stop::apply(stopped); }
  Tensor through, stopped;
};
TORCH_MODULE(Stopped);

}  // namespace

TEST_CASE("DataParallel with a parameter whose gradient a function leaves undefined", "[dp]") {
  Stopped alone, replicated;
  const Tensor batch = torch::randn({8, 3});
  alone(batch).square().mean().backward();
  REQUIRE_FALSE(alone->stopped.grad().defined());
  DataParallel dp(replicated, {.replicas = 2});
  dp.train_step(batch, [](StoppedImpl& net, Tensor& part) { return net.forward(part).square().mean(); });
  CHECK(at::allclose(replicated->through.grad(), alone->through.grad()));
  CHECK_FALSE((replicated->stopped.grad().defined() && replicated->stopped.grad().count_nonzero().item<int>() > 0));
}
