// Arguments that DataParallel refuses, and exceptions in replicas.
#include <torch/torch.h>

#include <exception>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <vector>

#include <ddpkit/error.h>
#include <ddpkit/parallel/data_parallel.h>

#include "support/catch.h"
#include "unit/data_parallel_net.h"

using namespace ddpkit::testing;
using ddpkit::DataParallel;
using ddpkit::Error;
using ddpkit::InvalidArgument;
using torch::Tensor;

TEST_CASE("an exception in a replica of DataParallel names it, and the next step works", "[dp]") {
  auto net = make_net();
  net->fails_at = 100;
  DataParallel dp(net, {.replicas = 3, .bucket_cap_mb = 0.001, .first_bucket_cap_mb = 0.001});
  auto reference = make_net();
  const Tensor good = batch_of(6);
  loss_of(reference->forward(good)).backward();
  Tensor bad = good.clone();
  bad[2][0] = 100;
  const auto message = ContainsSubstring("replica 1 of 3 on cpu: the sample is bad");
  CHECK_THROWS_WITH(dp(bad), message);
  CHECK_THROWS_WITH(dp.train_step(bad, kStepLoss), message);
  try {
    dp.train_step(bad, kStepLoss);
    FAIL("it must throw");
  } catch (const Error& error) {
    CHECK(error.context().call == "DataParallel");
    CHECK_THROWS_AS(std::rethrow_if_nested(error), std::runtime_error);
  }
  for (const Tensor& parameter : net->parameters()) CHECK_FALSE(parameter.grad().defined());
  dp.train_step(good, kStepLoss);
  check_same_gradients(net, reference);

  // In backward, after some gradients have arrived.
  struct Fails : torch::autograd::Function<Fails> {
    static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
      throw std::runtime_error("backward is bad");
    }
  };
  net->zero_grad();
  const auto loss = [](NetImpl& replica, const Tensor& part) {
    const Tensor hidden = torch::tanh(replica.second(torch::tanh(replica.first(part))));
    const bool fails = (part == 100).any().item<bool>();
    return loss_of(replica.last(fails ? Fails::apply(hidden) : hidden));
  };
  for (int i = 0; i < 3; ++i) {
    CHECK_THROWS_WITH(dp.train_step(bad, loss),
                      ContainsSubstring("replica 1 of 3 on cpu") && ContainsSubstring("backward is bad"));
    for (const Tensor& parameter : net->parameters()) CHECK_FALSE(parameter.grad().defined());
    dp.train_step(good, loss);
    check_same_gradients(net, reference);
    net->zero_grad();
  }
  torch::nn::Sequential breaks(torch::nn::Linear(6, 2), torch::nn::Functional([](const Tensor& x) {
                                 return (x > 50).any().item<bool>() ? Fails::apply(x) : x.clone();
                               }));
  DataParallel gathers(breaks, {.replicas = 3});
  {
    const torch::NoGradGuard no_grad;
    for (const Tensor& parameter : breaks->parameters()) parameter.fill_(1);
  }
  CHECK_THROWS_WITH(gathers(bad.to(torch::kFloat)).sum().backward(), ContainsSubstring("backward is bad"));
  for (const Tensor& parameter : breaks->parameters()) CHECK_FALSE(parameter.grad().defined());
  gathers(good.to(torch::kFloat)).sum().backward();
  CHECK(breaks->parameters()[1].grad()[0].item<float>() == 6);
}

TEST_CASE("DataParallel refuses unsupported calls and options", "[dp]") {
  struct Plain : torch::nn::Module {
    Tensor forward(const Tensor& x) { return x; }
  };
  CHECK_THROWS_WITH(DataParallel<Plain>(std::make_shared<Plain>()), ContainsSubstring("torch::nn::Cloneable"));
  auto net = make_net();
  CHECK_THROWS_AS(DataParallel(net, {.devices = {torch::Device("cuda:0")}}), InvalidArgument);
  if (!torch::cuda::is_available())
    CHECK_THROWS_WITH(DataParallel(net, {.devices = {torch::kCUDA}}),
                      ContainsSubstring("a replica is to be on cuda:0"));
  CHECK_THROWS_AS(DataParallel(net, {.replicas = 0}), InvalidArgument);
  CHECK_THROWS_AS(DataParallel(net, {.threads_per_replica = 0}), InvalidArgument);
  CHECK_THROWS_AS(DataParallel(net, {.bucket_cap_mb = 0}), InvalidArgument);
  CHECK_THROWS_AS(DataParallel(net, {.devices = {torch::kCPU}, .replicas = 2}), InvalidArgument);
  CHECK(DataParallel(net, {.devices = {torch::kCPU, torch::kCPU}}).replicas() == 2);
  CHECK(DataParallel(net).replicas() >= 1);

  DataParallel dp(net, {.replicas = 2});
  CHECK_THROWS_WITH(dp.train_step(std::make_tuple(batch_of(4), batch_of(3)),
                                  [](NetImpl&, const auto& part) { return std::get<0>(part).mean(); }),
                    ContainsSubstring("4 samples"));
  CHECK_THROWS_WITH(dp.train_step(batch_of(0), kStepLoss), ContainsSubstring("empty"));
  CHECK_THROWS_WITH(dp.train_step(3, [](NetImpl&, int) { return Tensor(); }), ContainsSubstring("map_tensors"));
  CHECK_THROWS_WITH(dp.train_step(batch_of(4), [](NetImpl& n, const Tensor& x) { return n.forward(x); }),
                    ContainsSubstring("mean loss"));
  CHECK_THROWS_WITH(dp.train_step(batch_of(4), [](NetImpl&, const Tensor& x) { return x.mean(); }),
                    ContainsSubstring("mean loss"));
  CHECK_THROWS_WITH(dp.train_step(batch_of(4), [&](NetImpl&, const Tensor& x) { return loss_of(dp(x)); }),
                    ContainsSubstring("from within a replica"));
  CHECK_NOTHROW(dp.train_step(batch_of(4), kStepLoss));
}

TEST_CASE("DataParallel names members that it cannot replicate", "[dp]") {
  struct HasBuffer : torch::nn::Cloneable<HasBuffer> {
    explicit HasBuffer(Tensor given) : like(std::move(given)) { reset(); }
    void reset() override {
      register_parameter("weight", torch::ones({2}));
      register_buffer("table", like);
    }
    Tensor forward(const Tensor& x) { return x; }
    Tensor like;
  };
  const auto refusal = [](const Tensor& buffer) -> std::string {
    try {
      DataParallel<HasBuffer>(std::make_shared<HasBuffer>(buffer), {.replicas = 2});
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  CHECK(refusal(torch::ones({3})).empty());
  CHECK(refusal(torch::ones({3}).to(at::kFloat8_e4m3fn)).empty());
  CHECK_THAT(refusal(torch::eye(3).to_sparse()), ContainsSubstring("buffer table") && ContainsSubstring("Sparse"));
  CHECK_THAT(refusal(torch::ones({3}, torch::kMeta)), ContainsSubstring("buffer table is on meta"));
  CHECK_THAT(refusal(torch::ones({3}, torch::requires_grad()) * 2), ContainsSubstring("buffer table"));

  struct HasList : torch::nn::Cloneable<HasList> {
    HasList() { reset(); }  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall)
    void reset() override { register_module("scales", torch::nn::ParameterList(torch::ones({2}))); }
    Tensor forward(const Tensor& x) { return x; }
  };
  CHECK_THROWS_WITH(
      DataParallel<torch::nn::SequentialImpl>(torch::nn::Sequential(HasList())),
      ContainsSubstring("0.scales") && ContainsSubstring("ParameterList") && ContainsSubstring("register_parameter()"));
}
