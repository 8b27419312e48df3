#include <torch/torch.h>

#include <atomic>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <ddpkit/comm/error.h>
#include <ddpkit/parallel/data_parallel.h>

#include "support/catch.h"

using ddpkit::DataParallel;
using ddpkit::DataParallelOptions;
using ddpkit::Error;
using ddpkit::InvalidArgument;
using torch::Tensor;

namespace {

constexpr double kTolerance = 1e-10;

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall)
  void reset() override {
    first = register_module("first", torch::nn::Linear(6, 40));
    second = register_module("second", torch::nn::Linear(40, 30));
    last = register_module("last", torch::nn::Linear(30, 3));
    unused = register_module("unused", torch::nn::Linear(2, 2));
  }
  Tensor forward(const Tensor& x) {
    if (fails_at >= 0 && (x == fails_at).any().item<bool>()) throw std::runtime_error("the sample is bad");
    return last(torch::tanh(second(torch::tanh(first(x)))));
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, last{nullptr}, unused{nullptr};
  double fails_at = -1;
};
TORCH_MODULE(Net);

Net make_net() {
  torch::manual_seed(5);
  Net net;
  net->to(torch::kDouble);
  return net;
}

torch::nn::Sequential make_norm_net() {
  torch::manual_seed(6);
  torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8), torch::nn::ReLU(),
                            torch::nn::Linear(8, 3));
  net->to(torch::kDouble);
  return net;
}

Tensor batch_of(std::int64_t samples, std::uint64_t seed = 1) {
  torch::manual_seed(seed);
  return torch::randn({samples, 6}, torch::kDouble);
}

Tensor loss_of(const Tensor& output) { return (output - 0.5).pow(2).mean(); }

const auto kStepLoss = [](auto& replica, const Tensor& part) { return loss_of(replica.forward(part)); };

template <class Module>
void check_same_gradients(const Module& module, const Module& reference) {
  const auto mine = module->named_parameters();
  const auto wanted = reference->named_parameters();
  for (const auto& item : wanted) {
    INFO(item.key());
    REQUIRE(mine[item.key()].grad().defined() == item.value().grad().defined());
    if (item.value().grad().defined()) CHECK(at::allclose(mine[item.key()].grad(), item.value().grad(), 0, kTolerance));
  }
}

struct Pair {
  Tensor left;
  Tensor right;
  int number = 0;
};
Pair map_tensors(const Pair& pair, const ddpkit::TensorMap& map) {
  return {map(pair.left), map(pair.right), pair.number};
}

/// Takes and gives all that can be nested.
struct NestedImpl : torch::nn::Cloneable<NestedImpl> {
  using Outputs = std::tuple<Tensor, std::map<std::string, Tensor>, std::vector<Tensor>, std::optional<Tensor>, Pair>;
  NestedImpl() { reset(); }  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall)
  void reset() override { weight = register_parameter("weight", torch::ones({}, torch::kDouble)); }
  Outputs forward(const std::tuple<Tensor, std::vector<Tensor>>& many, const std::map<std::string, Tensor>& named,
                  const Pair& pair, double factor, const std::string& name, const Tensor& scale,
                  const std::optional<Tensor>& none) {
    const Tensor a = std::get<0>(many) * weight * factor * scale;
    const Tensor b = std::get<1>(many)[0] + std::get<1>(many)[1];
    return {a, {{"x", named.at(name) * weight}}, {b, a.sum()}, none, {pair.left + 1, pair.right * weight, 7}};
  }
  Tensor weight;
};
TORCH_MODULE(Nested);

}  // namespace

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
        // And adds to what is there.
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
    // The sum over replicas, in order, of what each has alone.
    for (int r = 0; r < 3; ++r) (loss_of(reference->forward(batch.slice(0, 2 * r, 2 * r + 2))) / 3).backward();
    DataParallel dp(net, {.replicas = 3});
    dp.train_step(batch, kStepLoss);
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      const double tolerance = dtype == torch::kDouble ? 1e-12 : 0.05;
      CHECK(at::allclose(net->parameters()[i].grad(), reference->parameters()[i].grad(), tolerance, tolerance));
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

TEST_CASE("DataParallel scatters and gathers what is nested", "[dp]") {
  Nested reference;
  Nested net;
  DataParallel dp(net, {.replicas = 2});
  const auto column = [](double begin) { return torch::arange(begin, begin + 5, torch::kDouble); };
  const auto call = [&](auto&& forward) {
    return forward(std::make_tuple(column(0), std::vector<Tensor>{column(10), column(20)}),
                   std::map<std::string, Tensor>{{"k", column(30)}}, Pair{column(40), column(50), 3}, 2.0, "k",
                   torch::tensor(3.0, torch::kDouble), std::optional<Tensor>());
  };
  const auto wanted = call([&](const auto&... args) { return reference->forward(args...); });
  const auto outputs = call([&](const auto&... args) { return dp(args...); });
  CHECK(torch::equal(std::get<0>(outputs), std::get<0>(wanted)));
  CHECK(torch::equal(std::get<1>(outputs).at("x"), std::get<1>(wanted).at("x")));
  CHECK(torch::equal(std::get<2>(outputs)[0], std::get<2>(wanted)[0]));
  CHECK(std::get<2>(outputs)[1].sizes() == at::IntArrayRef({2}));  // A scalar of each replica.
  CHECK(torch::equal(std::get<2>(outputs)[1].sum(), std::get<2>(wanted)[1]));
  CHECK_FALSE(std::get<3>(outputs).has_value());
  CHECK(torch::equal(std::get<4>(outputs).left, column(41)));
  CHECK(torch::equal(std::get<4>(outputs).right, column(50)));
  CHECK(std::get<4>(outputs).number == 7);
  std::get<4>(outputs).right.sum().backward();
  CHECK(torch::equal(net->weight.grad(), column(50).sum()));

  // A batch as LibTorch's DataLoader makes it.
  auto classifier = make_net();
  DataParallel trains(classifier, {.replicas = 2});
  const torch::data::Example<> batch{batch_of(5), torch::tensor({0, 1, 2, 0, 1})};
  const Tensor loss = trains.train_step(batch, [](NetImpl& replica, const torch::data::Example<>& part) {
    return torch::cross_entropy_loss(replica.forward(part.data), part.target);
  });
  auto alone = make_net();
  const Tensor wanted_loss = torch::cross_entropy_loss(alone->forward(batch.data), batch.target);
  wanted_loss.backward();
  CHECK(loss.item<double>() == Approx(wanted_loss.item<double>()).epsilon(1e-12));
  check_same_gradients(classifier, alone);
}

TEST_CASE("with_tensors rebuilds what it can look into", "[dp]") {
  const Tensor one = torch::ones({1});
  const auto doubled = [](const Tensor& tensor) { return tensor * 2; };
  const std::pair<std::array<Tensor, 2>, std::string> value{{one, one}, "name"};
  const auto twice = ddpkit::with_tensors(value, doubled);
  CHECK(twice.first[1].item<float>() == 2);
  CHECK(twice.second == "name");
  torch::OrderedDict<std::string, Tensor> dict;
  dict.insert("a", one);
  CHECK(ddpkit::with_tensors(dict, doubled)["a"].item<float>() == 2);
  CHECK(ddpkit::with_tensors(torch::data::TensorExample(one), doubled).data.item<float>() == 2);
  CHECK(ddpkit::tensors_in(std::make_tuple(one, 3, std::vector{one, one}, std::optional<Tensor>())).size() == 3);
  struct Unknown {
    int number;
  };
  CHECK(ddpkit::with_tensors(Unknown{4}, doubled).number == 4);
}

TEST_CASE("DataParallel's buffers follow replica 0", "[dp]") {
  auto net = make_norm_net();
  auto alone = make_norm_net();
  DataParallel dp(net, {.replicas = 3});
  for (std::uint64_t step = 0; step < 5; ++step) {
    const Tensor batch = batch_of(7, step);
    // Replica 0 has samples 0 to 2, and its statistics are what persists: as in Python.
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
  // All replicas evaluate with them.
  net->eval();
  alone->eval();
  const Tensor batch = batch_of(8);
  CHECK(at::allclose(dp(batch), alone->forward(batch), 0, kTolerance));
  // One layer in another mode than the rest.
  net->train();
  net[1]->eval();
  const Tensor before = net->buffers()[0].clone();
  dp.train_step(batch, kStepLoss);
  CHECK(torch::equal(net->buffers()[0], before));
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

  // In backward, where some of the gradients are there already.
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

TEST_CASE("DataParallel refuses what it cannot do", "[dp]") {
  struct Plain : torch::nn::Module {
    Tensor forward(const Tensor& x) { return x; }
  };
  CHECK_THROWS_WITH(DataParallel<Plain>(std::make_shared<Plain>()), ContainsSubstring("torch::nn::Cloneable"));
  auto net = make_net();
  CHECK_THROWS_AS(DataParallel(net, {.devices = {torch::Device("cuda:0")}}), InvalidArgument);
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
  // Thawed, other values in place, values from elsewhere, another type.
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

TEST_CASE("DataParallel's arena serves its tensors, which outlive it", "[dp][arena]") {
  torch::nn::Sequential net(torch::nn::Linear(64, 512), torch::nn::Tanh(), torch::nn::Linear(512, 3));
  const Tensor batch = torch::randn({64, 64});
  const auto loss = [](torch::nn::SequentialImpl& replica, const Tensor& part) {
    return replica.forward(part).square().mean();
  };
  Tensor kept;
  {
    DataParallel dp(net, {.replicas = 2});
    REQUIRE(dp.arena());
    for (int step = 0; step < 3; ++step) dp.train_step(batch, loss);
    const auto warm = *dp.arena();
    CHECK(warm.allocations > 0);
    CHECK(warm.peak > 512 * 64 * sizeof(float));
    for (int step = 0; step < 20; ++step) dp.train_step(batch, loss);
    // The same blocks, again and again.
    CHECK(dp.arena()->reserved <= warm.reserved + (4 << 20));
    kept = dp(batch).detach() + 0;
    DataParallel second(net, {.replicas = 2});
    CHECK_FALSE(second.arena());
  }
  CHECK(at::allclose(kept, net->forward(batch), 0, 1e-5));
  CHECK_FALSE(DataParallel(net, {.replicas = 2, .arena = false}).arena());
  CHECK_FALSE(DataParallel(net, {.replicas = 1}).arena());
  CHECK_THROWS_AS(DataParallel(net, {.replicas = 2, .arena_mb = -1}), InvalidArgument);
  // Full: the rest comes from malloc.
  DataParallel small(net, {.replicas = 2, .arena_mb = 0.1});
  net->zero_grad();
  small.train_step(batch, loss);
  const Tensor gradient = net->parameters()[0].grad().clone();
  CHECK(small.arena()->refused > 0);
  net->zero_grad();
  net->forward(batch).square().mean().backward();
  CHECK(at::allclose(net->parameters()[0].grad(), gradient, 1e-4, 1e-6));
}

TEST_CASE("DataParallel sums gradients that are one piece of memory once each", "[dp]") {
  // Autograd hands the same memory on as the gradient of both.
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
    const Tensor own = torch::rand({4});  // The caller's numbers go on alike.
    return torch::cat({torch::stack(all).flatten(), own});
  };
  const Tensor first = outputs(1);
  for (int run = 0; run < 5; ++run) CHECK(outputs(1).equal(first));
  CHECK_FALSE(outputs(2).equal(first));
  // Replicas, steps and samples all differ.
  const Tensor steps = first.slice(0, 0, 50 * 8 * 3).view({50 * 8, 3});
  CHECK(std::get<0>(at::unique_dim(steps.slice(0, 0, 80), 0)).size(0) > 60);
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
      // Each replica has the same weights and buffers: it gives the same on the same input.
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
  // `sometimes` is used by no replica, by one, by all but one.
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
