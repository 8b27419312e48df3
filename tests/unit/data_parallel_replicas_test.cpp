// DataParallel's replicas follow the module's weights, buffers and mode. Each run gives the same bits. DataParallel
// does not change the caller's random numbers and threads.
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <ddpkit/error.h>
#include <ddpkit/parallel/data_parallel.h>

#include "support/catch.h"
#include "unit/data_parallel_net.h"

using namespace ddpkit::testing;
using ddpkit::DataParallel;
using ddpkit::Error;
using torch::Tensor;

namespace {

torch::nn::Sequential make_norm_net() {
  torch::manual_seed(6);
  torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8), torch::nn::ReLU(),
                            torch::nn::Linear(8, 3));
  net->to(torch::kDouble);
  return net;
}

}  // namespace

TEST_CASE("DataParallel's replicas follow the module", "[dp]") {
  auto net = make_net();
  net->first->weight.set_requires_grad(false);
  DataParallel dp(net, {.replicas = 2});
  const Tensor batch = batch_of(5);
  auto reference = make_net();
  const auto check = [&] {
    reference->zero_grad();
    net->zero_grad();
    loss_of(reference->forward(batch)).backward();
    dp.train_step(batch, kStepLoss);
    check_same_gradients(net, reference);
  };
  reference->first->weight.set_requires_grad(false);
  check();
  // Unfreezes a weight, writes values in place, assigns values, and changes the type.
  net->first->weight.set_requires_grad(true);
  reference->first->weight.set_requires_grad(true);
  check();
  {
    const torch::NoGradGuard no_grad;
    for (const auto& one : {net, reference}) one->second->weight.mul_(1.5);
  }
  check();
  for (const auto& one : {net, reference}) one->last->weight.set_data(torch::ones({3, 30}, torch::kDouble) / 10);
  check();
  std::stringstream saved;
  torch::save(reference, saved);
  {
    const torch::NoGradGuard no_grad;
    for (const Tensor& parameter : net->parameters()) parameter.zero_();
  }
  torch::load(net, saved);
  check();
  net->to(torch::kFloat);
  CHECK(dp(batch.to(torch::kFloat)).scalar_type() == torch::kFloat);
  net->fails_at = 3;
  dp.replicate();
  CHECK_THROWS_AS(dp(torch::full({2, 6}, 3.F)), Error);
}

TEST_CASE("DataParallel's buffers follow replica 0", "[dp]") {
  auto net = make_norm_net();
  auto alone = make_norm_net();
  DataParallel dp(net, {.replicas = 3});
  for (std::uint64_t step = 0; step < 5; ++step) {
    const Tensor batch = batch_of(7, step);
    // Replica 0 has samples 0 to 2. Its statistics persist, as in Python.
    alone->forward(batch.slice(0, 0, 3));
    if (step % 2 == 0) {
      dp.train_step(batch, kStepLoss);
    } else {
      dp(batch);
    }
  }
  const auto buffers = net->named_buffers();
  const auto wanted = alone->named_buffers();
  for (const auto& item : wanted) CHECK(at::allclose(buffers[item.key()], item.value(), 0, kTolerance));
  // All replicas use these statistics in evaluation.
  net->eval();
  alone->eval();
  const Tensor batch = batch_of(8);
  CHECK(at::allclose(dp(batch), alone->forward(batch), 0, kTolerance));
  // One layer has another mode than the rest.
  net->train();
  net[1]->eval();
  const Tensor before = net->buffers()[0].clone();
  dp.train_step(batch, kStepLoss);
  CHECK(torch::equal(net->buffers()[0], before));
}

TEST_CASE("DataParallel's buffers leave the graphs of earlier forwards valid", "[dp]") {
  const Tensor batches[] = {batch_of(6, 1), batch_of(6, 2)};
  for (const bool trains : {true, false}) {
    INFO("train " << trains);
    auto net = make_norm_net();
    net->train(trains);
    auto reference = make_norm_net();
    reference->train(trains);
    for (const Tensor& batch : batches) {
      const auto parts = batch.chunk(2);
      loss_of(torch::cat({reference->forward(parts[0]), reference->forward(parts[1])})).backward();
    }
    DataParallel dp(net, {.replicas = 2});
    const Tensor first = dp(batches[0]), second = dp(batches[1]);
    (loss_of(first) + loss_of(second)).backward();
    check_same_gradients(net, reference);
  }
  // Autograd sees this change, so it invalidates the graph, as without DataParallel.
  auto net = make_norm_net();
  net->eval();
  DataParallel dp(net, {.replicas = 2});
  const Tensor first = dp(batches[0]);
  net->named_buffers()["1.running_var"].mul_(2);
  dp(batches[1]);
  CHECK_THROWS_WITH(loss_of(first).backward(), ContainsSubstring("modified by an inplace operation"));
}

TEST_CASE("replicas on several devices notify autograd of a write between forward and backward", "[dp]") {
  static std::vector<std::pair<Tensor, Tensor>> calls;  // Inputs and outputs of the replicas.
  static std::mutex mutex;
  struct KeepsOutputsImpl : torch::nn::Cloneable<KeepsOutputsImpl> {
    KeepsOutputsImpl() { reset(); }  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall)
    void reset() override { linear = register_module("linear", torch::nn::Linear(6, 3)); }
    Tensor forward(const Tensor& x) {
      const Tensor output = linear(x);
      const std::lock_guard lock(mutex);
      calls.emplace_back(x, output);
      return output;
    }
    torch::nn::Linear linear{nullptr};
  };
  for (const bool writes : {false, true}) {
    auto net = std::make_shared<KeepsOutputsImpl>();
    net->to(torch::kDouble);
    // Two device names: DataParallel copies weights between them and does not share.
    DataParallel dp(net, {.devices = {torch::Device("cpu"), torch::Device("cpu:0")}});
    calls.clear();
    const Tensor gathered = dp(batch_of(6).requires_grad_());
    const auto of_second = [&](const auto& call) { return torch::equal(call.second, gathered.narrow(0, 3, 3)); };
    const auto found = std::find_if(calls.begin(), calls.end(), of_second);
    REQUIRE(found != calls.end());
    const auto [input, output] = *found;
    if (writes) {
      const torch::NoGradGuard no_grad;
      net->linear->weight.sub_(0.1);
    }
    dp(batch_of(6));  // Copies the weights to the second replica.
    const auto backward = [&, x = input, y = output] { return torch::autograd::grad({y.sum()}, {x}); };
    if (writes)
      CHECK_THROWS_WITH(backward(), ContainsSubstring("modified by an inplace operation"));
    else
      CHECK_NOTHROW(backward());
  }
}

TEST_CASE("DataParallel trains 1,000 steps as one device, the same bits in each run", "[dp]") {
  const auto train = [](bool gathers) {
    auto net = make_norm_net();
    DataParallel dp(net, {.replicas = 3, .bucket_cap_mb = 0.0002, .first_bucket_cap_mb = 0.0002});
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    for (std::uint64_t step = 0; step < 1000; ++step) {
      const Tensor batch = batch_of(6 + static_cast<std::int64_t>(step % 9), step);
      optimizer.zero_grad();
      if (gathers) {
        loss_of(dp(batch)).backward();
      } else {
        dp.train_step(batch, kStepLoss);
      }
      optimizer.step();
      if (step % 250 != 249) continue;
      // All replicas have the same weights and buffers, so equal inputs give equal outputs.
      net->eval();
      const Tensor same = batch_of(2, step).repeat({3, 1});
      const auto parts = dp(same).chunk(3);
      CHECK(torch::equal(parts[1], parts[0]));
      CHECK(torch::equal(parts[2], parts[0]));
      CHECK(torch::equal(parts[0], net->forward(same.narrow(0, 0, 2))));
      net->train();
    }
    return net;
  };
  const auto first = train(false);
  const auto again = train(false);
  const auto gathered = train(true);
  for (const auto& item : first->named_parameters()) {
    CHECK(torch::equal(again->named_parameters()[item.key()], item.value()));
    CHECK(at::allclose(gathered->named_parameters()[item.key()], item.value(), 0, 1e-8));
  }
  for (const auto& item : first->named_buffers()) CHECK(torch::equal(again->named_buffers()[item.key()], item.value()));
}

TEST_CASE("DataParallel with dropout and noise gives the same bits in each run", "[dp]") {
  struct NoisyImpl : torch::nn::Cloneable<NoisyImpl> {
    NoisyImpl() { reset(); }  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall)
    void reset() override { linear = register_module("linear", torch::nn::Linear(6, 3)); }
    Tensor forward(const Tensor& x) {
      const Tensor noisy = x + 0.1 * torch::randn_like(x) + 0.1 * torch::rand_like(x);
      return torch::dropout(linear(noisy), 0.5, is_training());
    }
    torch::nn::Linear linear{nullptr};
  };
  const auto outputs = [](std::uint64_t seed) {
    torch::manual_seed(9);
    auto net = std::make_shared<NoisyImpl>();
    DataParallel dp(net, {.replicas = 4});
    torch::manual_seed(seed);
    std::vector<Tensor> all;
    for (int step = 0; step < 50; ++step) all.push_back(dp(torch::ones({8, 6})).detach());
    const Tensor own = torch::rand({4});  // The caller's generator is in the same state.
    return torch::cat({torch::stack(all).flatten(), own});
  };
  const Tensor first = outputs(1);
  for (int run = 0; run < 5; ++run) CHECK(outputs(1).equal(first));
  CHECK_FALSE(outputs(2).equal(first));
  // The values differ between replicas, steps and samples.
  const Tensor steps = first.slice(0, 0, 50 * 8 * 3).view({50 * 8, 3});
  CHECK(std::get<0>(at::unique_dim(steps.slice(0, 0, 80), 0)).size(0) > 60);
}

TEST_CASE("DataParallel leaves the caller's random numbers and threads alone", "[dp]") {
  auto net = make_net();
  torch::manual_seed(9);
  const Tensor wanted = torch::randn({3});
  const int threads = at::get_num_threads();
  torch::manual_seed(9);
  DataParallel dp(net, {.replicas = 2, .threads_per_replica = threads + 1});
  CHECK(torch::equal(torch::randn({3}), wanted));
  CHECK(at::get_num_threads() == threads);
  int in_new_thread = 0;
  std::thread([&] { in_new_thread = at::get_num_threads(); }).join();
  CHECK(in_new_thread == threads);
  std::atomic<int> wrong = 0;
  dp.train_step(batch_of(4), [&](NetImpl& replica, const Tensor& part) {
    if (at::get_num_threads() != threads + 1) ++wrong;
    const Tensor hidden = replica.forward(part);
    hidden.register_hook([&wrong, threads, here = std::this_thread::get_id()](const Tensor&) {
      if (at::get_num_threads() != threads + 1 || std::this_thread::get_id() != here) ++wrong;
    });
    return loss_of(hidden);
  });
  CHECK(wrong == 0);
}
