// Handles in a module's members: DataParallel's replicas keep them, or DataParallel refuses the module and names it.
#include <torch/torch.h>

#include <memory>
#include <vector>

#include <ddpkit/error.h>
#include <ddpkit/parallel/data_parallel.h>

#include "support/catch.h"
#include "unit/data_parallel_net.h"

using namespace ddpkit::testing;
using ddpkit::DataParallel;
using ddpkit::InvalidArgument;
using torch::Tensor;

namespace {

/// A projection whose class is not from LibTorch.
struct ProjectionImpl : torch::nn::Cloneable<ProjectionImpl> {
  ProjectionImpl() { reset(); }  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall)
  void reset() override { matrix = register_parameter("matrix", torch::randn({6, 6}, torch::kDouble)); }
  Tensor forward(const Tensor& x) { return x.matmul(matrix.t()); }
  Tensor matrix;
};
TORCH_MODULE(Projection);

enum class Tie { kHandleInReset, kHandle, kNewName, kOwnClass };

struct TiedImpl : torch::nn::Cloneable<TiedImpl> {
  explicit TiedImpl(Tie how) : tie(how) {
    reset();  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall)
    if (tie == Tie::kHandle) head->weight = body->weight;
    if (tie == Tie::kOwnClass) projection->matrix = body->weight;
  }
  void reset() override {
    body = register_module("body", torch::nn::Linear(6, 6));
    head = register_module("head", torch::nn::Linear(6, 6));
    projection = register_module("projection", Projection());
    body->to(torch::kDouble);
    head->to(torch::kDouble);
    if (tie == Tie::kHandleInReset) head->weight = body->weight;
    if (tie == Tie::kNewName) second_name = register_parameter("second_name", body->weight);
  }
  Tensor forward(const Tensor& x) {
    const Tensor hidden = projection(torch::tanh(head(torch::tanh(body(x)))));
    return second_name.defined() ? torch::linear(hidden, second_name) : hidden;
  }
  Tie tie;
  torch::nn::Linear body{nullptr}, head{nullptr};
  Projection projection{nullptr};
  Tensor second_name;
};
TORCH_MODULE(Tied);

/// A module whose clone does not keep its references.
struct OddImpl : torch::nn::Cloneable<OddImpl> {
  explicit OddImpl(int kind) : kind(kind) {
    reset();  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall)
    if (kind == 2) inner->weight = torch::ones({6, 6}, torch::kDouble);
    if (kind == 4) spare = inner;
  }
  void reset() override {
    inner = register_module("inner", torch::nn::Linear(6, 6));
    inner->to(torch::kDouble);
    if (kind == 1) spare_weight = inner->weight;
    layers.push_back(register_module("last", torch::nn::Linear(6, 6)));
    layers.back()->to(torch::kDouble);
    if (kind != 3) layers.erase(layers.begin(), layers.end() - 1);
  }
  Tensor forward(const Tensor& x) {
    Tensor y = spare_weight.defined() ? torch::linear(x, spare_weight) : inner(x);
    for (auto& layer : layers) y = layer(y);
    return spare.is_empty() ? y : spare(y);
  }
  int kind;
  torch::nn::Linear inner{nullptr}, spare{nullptr};
  std::vector<torch::nn::Linear> layers;
  Tensor spare_weight;
};
TORCH_MODULE(Odd);

/// Two parents register one batch norm.
struct ParentImpl : torch::nn::Cloneable<ParentImpl> {
  explicit ParentImpl(torch::nn::BatchNorm1d given) : norm(std::move(given)) { register_module("norm", norm); }
  void reset() override { norm = register_module("norm", torch::nn::BatchNorm1d(6)); }
  Tensor forward(const Tensor& x) { return norm(x); }
  torch::nn::BatchNorm1d norm;
};
TORCH_MODULE(Parent);

template <class Net>
void check_gradients_and_outputs(Net net) {
  net->zero_grad();
  const Tensor batch = batch_of(7);
  std::vector<Tensor> wanted;
  loss_of(net->forward(batch)).backward();
  for (const Tensor& parameter : net->parameters())
    wanted.push_back(parameter.grad().defined() ? parameter.grad().clone() : Tensor());
  DataParallel dp(net, {.replicas = 3});
  for (const bool gathers : {false, true}) {
    net->zero_grad();
    if (gathers) {
      loss_of(dp(batch)).backward();
    } else {
      dp.train_step(batch, kStepLoss);
    }
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const Tensor gradient = net->parameters()[i].grad();
      INFO("parameter " << i);
      REQUIRE(gradient.defined() == wanted[i].defined());
      if (gradient.defined()) CHECK(at::allclose(gradient, wanted[i], 0, kTolerance));
    }
  }
  const torch::NoGradGuard no_grad;
  CHECK(at::allclose(dp(batch), net->forward(batch), 0, kTolerance));
}

}  // namespace

TEST_CASE("DataParallel's replicas keep ties of weights", "[dp]") {
  torch::manual_seed(5);
  for (const Tie tie : {Tie::kHandleInReset, Tie::kHandle, Tie::kNewName, Tie::kOwnClass}) {
    INFO("tie " << static_cast<int>(tie));
    check_gradients_and_outputs(Tied(tie));
  }
  torch::nn::Linear twice(6, 6);
  twice->to(torch::kDouble);
  check_gradients_and_outputs(torch::nn::Sequential(twice, torch::nn::Tanh(), twice));
}

TEST_CASE("DataParallel refuses members that a clone does not keep", "[dp]") {
  const auto refusal = [](int kind, const char* phrase) {
    INFO("kind " << kind);
    CHECK_THROWS_WITH(DataParallel(Odd(kind), {.replicas = 2}),
                      ContainsSubstring(phrase) && ContainsSubstring("reset()"));
  };
  CHECK_NOTHROW(DataParallel(Odd(0), {.replicas = 2}));
  refusal(1, "inner.weight");
  refusal(2, "inner.weight");
  refusal(3, "module last");
  refusal(4, "module inner");
}

TEST_CASE("DataParallel's replicas keep a module that two parents share", "[dp]") {
  torch::nn::BatchNorm1d norm(6);
  norm->to(torch::kDouble);
  torch::nn::Sequential net(Parent(norm), torch::nn::Linear(6, 6), Parent(norm));
  net->to(torch::kDouble);
  DataParallel dp(net, {.replicas = 2});
  const Tensor half = batch_of(4);
  // Both replicas have the same samples, so each has the module's statistics.
  std::vector<Tensor> of_replicas(2);
  dp.train_step(half.repeat({2, 1}), [&](torch::nn::SequentialImpl& replica, const Tensor& part) {
    const Tensor loss = loss_of(replica.forward(part));
    const Tensor mean = replica.buffers()[0];
    of_replicas[mean.data_ptr() == norm->running_mean.data_ptr() ? 0 : 1] = mean.clone();
    return loss;
  });
  CHECK(at::allclose(of_replicas[1], of_replicas[0], 0, kTolerance));
}

TEST_CASE("DataParallel clones LibTorch's modules", "[dp]") {
  namespace nn = torch::nn;
  const std::vector<std::shared_ptr<nn::Module>> modules{
      nn::LSTM(nn::LSTMOptions(4, 4).num_layers(2).bidirectional(true)).ptr(),
      nn::GRU(4, 4).ptr(),
      nn::RNN(4, 4).ptr(),
      nn::LSTMCell(4, 4).ptr(),
      nn::MultiheadAttention(4, 2).ptr(),
      nn::Transformer(nn::TransformerOptions(4, 2, 1, 1).dim_feedforward(4)).ptr(),
      nn::Embedding(3, 4).ptr(),
      nn::EmbeddingBag(3, 4).ptr(),
      nn::Conv2d(2, 2, 3).ptr(),
      nn::ConvTranspose1d(2, 2, 3).ptr(),
      nn::Bilinear(2, 2, 2).ptr(),
      nn::InstanceNorm1d(nn::InstanceNorm1dOptions(3).affine(true).track_running_stats(true)).ptr(),
      nn::GroupNorm(1, 3).ptr(),
      nn::LayerNorm(nn::LayerNormOptions({3})).ptr(),
      nn::PReLU().ptr(),
      nn::AdaptiveLogSoftmaxWithLoss(64, 8, std::vector<std::int64_t>{2, 4}).ptr(),
      nn::ModuleDict(std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{{"a", nn::Linear(2, 2).ptr()}})
          .ptr(),
      nn::ModuleList(nn::Linear(2, 2), nn::BatchNorm1d(2)).ptr(),
      nn::Sequential(nn::Functional([](const Tensor& x) { return x; }), nn::Linear(2, 2)).ptr()};
  for (const auto& module : modules) {
    INFO(module->name());
    CHECK_NOTHROW(DataParallel<nn::Module>(module, {.replicas = 2}));
  }
}
