#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <optional>
#include <thread>
#include <tuple>

#include <ddpkit/error.h>
#include <ddpkit/optim/precision.h>
#include <ddpkit/parallel/activation_checkpoint.h>

#include "support/catch.h"

using ddpkit::activation_checkpoint;
using Tensors = std::vector<torch::Tensor>;

namespace {

/// Blocks of 12 features with dropout, each under activation_checkpoint() or not.
struct Blocks {
  explicit Blocks(double dropout = 0.3) {
    torch::manual_seed(1);
    for (int i = 0; i < 4; ++i) {
      blocks.emplace_back(torch::nn::Linear(12, 24), torch::nn::Tanh(), torch::nn::Dropout(dropout),
                          torch::nn::Linear(24, 12), torch::nn::Sigmoid());
    }
  }
  torch::Tensor operator()(torch::Tensor x, bool checkpointed) {
    for (auto& block : blocks)
      x = checkpointed ? activation_checkpoint([block](const torch::Tensor& y) mutable { return block->forward(y); }, x)
                       : block->forward(x);
    return x;
  }
  Tensors gradients() const {
    Tensors all;
    for (const auto& block : blocks) {
      for (const auto& parameter : block->parameters()) all.push_back(parameter.grad());
    }
    return all;
  }
  void zero_grad() {
    for (auto& block : blocks) block->zero_grad();
  }
  std::vector<torch::nn::Sequential> blocks;
};

void check_same_bits(const Tensors& a, const Tensors& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    INFO("tensor " << i);
    CHECK(a[i].defined() == b[i].defined());
    if (a[i].defined()) CHECK(torch::equal(a[i], b[i]));
  }
}

torch::Tensor input() {
  torch::manual_seed(7);
  return torch::randn({5, 12}).requires_grad_();
}

/// Runs `train` with and without checkpoints, and compares what it returns, and the random numbers after it.
template <class Train>
void check_same(const Train& train) {
  std::vector<Tensors> results;
  for (const bool checkpointed : {false, true}) {
    torch::manual_seed(3);
    results.push_back(train(checkpointed));
    results.back().push_back(torch::rand({3}));
  }
  check_same_bits(results[0], results[1]);
}

const auto kModified = ContainsSubstring("has been modified by an in-place operation");
const auto kModifiedInput = ContainsSubstring("modified by an inplace operation");

/// An identity whose backward runs a backward through `depth` more of them.
struct Nested : torch::autograd::Function<Nested> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x, std::int64_t depth) {
    context->saved_data["depth"] = depth;
    return x.clone();
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    const std::int64_t depth = context->saved_data["depth"].toInt();
    if (depth == 0) return {gradients[0], torch::Tensor()};
    const torch::AutoGradMode with_gradients(true);
    auto x = gradients[0].detach().requires_grad_();
    apply(x, depth - 1).backward(gradients[0]);
    return {x.grad(), torch::Tensor()};
  }
};

}  // namespace

TEST_CASE("activation checkpoints leave losses, gradients and random numbers as they are", "[checkpointing]") {
  check_same([](bool checkpointed) {
    Blocks blocks;
    auto x = input();
    const auto loss = blocks(x, checkpointed).pow(2).sum();
    loss.backward();
    auto results = blocks.gradients();
    results.insert(results.end(), {loss.detach(), x.grad()});
    return results;
  });
}

TEST_CASE("activation checkpoints of common modules give the same gradients", "[checkpointing]") {
  const auto same = [](auto module, const std::vector<std::int64_t>& sizes, const auto& call) {
    module->train();
    check_same([&](bool checkpointed) {
      module->zero_grad();
      auto x = torch::randn(sizes).requires_grad_();
      auto run = [module, call](const torch::Tensor& y) mutable { return call(module, y); };
      (checkpointed ? activation_checkpoint(run, x) : run(x)).pow(2).sum().backward();
      Tensors results{x.grad()};
      for (const auto& parameter : module->parameters()) results.push_back(parameter.grad().clone());
      return results;
    });
  };
  const auto forward = [](auto& module, const torch::Tensor& y) { return module->forward(y); };
  same(torch::nn::Sequential(torch::nn::Conv2d(3, 6, 3), torch::nn::BatchNorm2d(6), torch::nn::ReLU(),
                             torch::nn::MaxPool2d(2), torch::nn::Conv2d(6, 4, 3)),
       {2, 3, 12, 12}, forward);
  same(torch::nn::LSTM(torch::nn::LSTMOptions(8, 10).num_layers(2).dropout(0.4)), {6, 3, 8},
       [](auto& module, const torch::Tensor& y) { return std::get<0>(module->forward(y)); });
  same(torch::nn::TransformerEncoderLayer(torch::nn::TransformerEncoderLayerOptions(8, 2).dropout(0.2)), {5, 3, 8},
       forward);
}

TEST_CASE("activation checkpoints within activation checkpoints", "[checkpointing]") {
  check_same([](bool checkpointed) {
    Blocks blocks;
    auto x = input();
    const auto whole = [&blocks](const torch::Tensor& y) { return blocks(y, true); };
    (checkpointed
         ? activation_checkpoint([whole](const torch::Tensor& y) { return activation_checkpoint(whole, y); }, x)
         : blocks(x, false))
        .sum()
        .backward();
    return blocks.gradients();
  });
}

TEST_CASE("several backwards through an activation checkpoint", "[checkpointing]") {
  check_same([](bool checkpointed) {
    Blocks blocks;
    const auto y = blocks(input(), checkpointed);
    y.sum().backward({}, /*retain_graph=*/true);
    y.pow(2).sum().backward({}, /*retain_graph=*/true);
    y.sum().backward();
    return blocks.gradients();
  });
}

TEST_CASE("second derivatives through an activation checkpoint", "[checkpointing]") {
  check_same([](bool checkpointed) {
    Blocks blocks;
    auto x = input();
    const auto y = blocks(x, checkpointed);
    const auto gradient =
        torch::autograd::grad({y.pow(2).sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    gradient[0].pow(2).sum().backward();
    return blocks.gradients();
  });
}

TEST_CASE("a gradient inside of an activation checkpoint", "[checkpointing]") {
  check_same([](bool checkpointed) {
    auto x = input(), weight = torch::linspace(-1, 1, 12).requires_grad_();
    const auto penalty = [weight](const torch::Tensor& y) {
      const auto inner = (y * weight).sin();
      return inner + torch::autograd::grad({inner.exp().sum()}, {y}, {}, true, /*create_graph=*/true)[0];
    };
    (checkpointed ? activation_checkpoint(penalty, x) : penalty(x)).pow(2).sum().backward();
    return Tensors{x.grad(), weight.grad()};
  });
}

TEST_CASE("the second run of an activation checkpoint uses autocast's settings and weights of now", "[checkpointing]") {
  check_same([](bool checkpointed) {
    Blocks blocks;
    Tensors results;
    for (int step = 0; step < 3; ++step) {
      blocks.zero_grad();
      torch::Tensor loss;
      {
        const ddpkit::optim::Autocast autocast(torch::kCPU, torch::kBFloat16);
        loss = blocks(input(), checkpointed).to(torch::kFloat).sum();
      }
      loss.backward();
      CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
      for (auto& block : blocks.blocks) {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : block->parameters()) parameter.sub_(parameter.grad());
      }
      for (const auto& gradient : blocks.gradients()) results.push_back(gradient.clone());
    }
    return results;
  });
}

TEST_CASE("an activation checkpoint takes and returns nested values", "[checkpointing]") {
  using Inputs = std::tuple<std::map<std::string, torch::Tensor>, std::optional<torch::Tensor>, int>;
  check_same([](bool checkpointed) {
    const auto a = input(), b = input();
    const auto function = [](const Inputs& inputs, const std::vector<torch::Tensor>& list, const std::string& key) {
      const auto& [map, extra, factor] = inputs;
      auto sum = map.at(key).sin() * factor;
      if (extra) sum = sum * *extra;
      return std::pair(sum.exp(), std::optional(list[0].tanh() * list[1].tanh()));
    };
    const Inputs inputs{{{"a", a}, {"none", torch::Tensor()}}, b, 2};
    const std::vector<torch::Tensor> list{a, b};
    const auto [first, second] =
        checkpointed ? activation_checkpoint(function, inputs, list, std::string("a")) : function(inputs, list, "a");
    (first * *second).sum().backward();
    return Tensors{first.detach(), second->detach(), a.grad(), b.grad()};
  });
}

TEST_CASE("an activation checkpoint keeps no activation, and frees what it recomputes", "[checkpointing]") {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> hidden;
  const auto watched = [&hidden](const torch::Tensor& tensor) {
    hidden.emplace_back(tensor.storage().getWeakStorageImpl());
    return tensor;
  };
  const auto alive = [&] { return std::ranges::count_if(hidden, [](const auto& each) { return !each.expired(); }); };
  const auto captured = std::make_shared<int>();
  auto x = input();
  auto y = activation_checkpoint(
      [watched, captured](const torch::Tensor& z) { return watched(watched(z.sin()).exp()).cos(); }, x);
  CHECK(hidden.size() == 2);
  CHECK(alive() == 0);
  CHECK(captured.use_count() > 1);
  y.sum().backward();
  CHECK(hidden.size() == 4);
  CHECK(alive() == 0);
  y.reset();
  CHECK(captured.use_count() == 1);
  CHECK(torch::allclose(x.grad(), -x.sin().exp().sin() * x.sin().exp() * x.cos()));

  hidden.clear();
  const auto two = [watched](const torch::Tensor& z) {
    const auto first = watched(z.exp());
    return std::pair(first + 0, watched(z.tanh()) + 0);
  };
  auto [first, second] = activation_checkpoint({.early_stop = false}, two, x);
  first.sum().backward({}, /*retain_graph=*/true);
  CHECK(hidden.size() == 4);
  CHECK(alive() == 1);  // What the second output needs.
  second.reset();
  CHECK(alive() == 0);
}

TEST_CASE("the second run stops after the last tensor that backward needs, unless it must not", "[checkpointing]") {
  for (const bool early_stop : {true, false}) {
    int begun = 0, ended = 0;
    auto x = input();
    const auto function = [&](const torch::Tensor& y) {
      ++begun;
      const auto result = y.sin();
      ++ended;
      return result;
    };
    const auto y = activation_checkpoint({.early_stop = early_stop}, function, x);
    CHECK(begun == 1);
    y.sum().backward();
    CHECK(begun == 2);
    CHECK(ended == (early_stop ? 1 : 2));
    CHECK(torch::equal(x.grad(), x.cos()));
  }
}

TEST_CASE("an activation checkpoint without gradients runs its function once", "[checkpointing]") {
  int calls = 0;
  const torch::NoGradGuard no_grad;
  const auto y = activation_checkpoint(
      [&](const torch::Tensor& z) {
        ++calls;
        return z.sin();
      },
      input());
  CHECK(calls == 1);
  CHECK_FALSE(y.requires_grad());
}

TEST_CASE("an activation checkpoint whose tensors have changed is an error, as without it", "[checkpointing]") {
  auto x = input(), weight = torch::ones({12}).requires_grad_();
  const auto function = [weight](const torch::Tensor& y) { return (y * weight).sin(); };
  const auto change = [](torch::Tensor tensor) {
    const torch::NoGradGuard no_grad;
    tensor.add_(1);
  };
  auto y = activation_checkpoint(function, x);
  change(weight);
  CHECK_THROWS_WITH(y.sum().backward(), kModified);
  auto leaf = input();
  y = activation_checkpoint(function, leaf);
  change(leaf);
  CHECK_THROWS_WITH(y.sum().backward(), kModified || kModifiedInput);
  y = activation_checkpoint(
      [](const torch::Tensor& z) {
        auto hidden = z.sigmoid();  // Its gradient needs the result.
        hidden.add_(1);
        return hidden.sin();
      },
      x);
  CHECK_THROWS_WITH(y.sum().backward(), kModified || kModifiedInput);
  y = activation_checkpoint(function, x);
  y.sum().backward();
  CHECK(x.grad().defined());
}

TEST_CASE("an activation checkpoint whose second run differs is an error", "[checkpointing]") {
  auto x = input();
  int calls = 0;
  const auto shrinking = [&calls](const torch::Tensor& y) {
    const auto part = y.narrow(0, 0, 5 - calls++);
    return (part.sin() * part.cos()).sum();
  };
  CHECK_THROWS_WITH(activation_checkpoint(shrinking, x).backward(),
                    ContainsSubstring("was [5, 12] Float on cpu in forward, but is [4, 12] Float on cpu"));
  calls = 0;
  const auto shorter = [&calls](const torch::Tensor& y) { return calls++ == 0 ? y.sin().cos().sum() : y.sin().sum(); };
  CHECK_THROWS_WITH(activation_checkpoint(shorter, x).backward(), ContainsSubstring("both runs must compute the same"));
}

TEST_CASE("an exception in either run of an activation checkpoint leaves the next step right", "[checkpointing]") {
  for (const int failing : {1, 2}) {
    check_same([&](bool checkpointed) {
      if (checkpointed) {
        auto x = input();
        int calls = 0;
        const auto fails = [&](const torch::Tensor& y) {
          if (++calls == failing) throw std::runtime_error("no such luck");
          return torch::dropout(y, 0.5, true).sin();
        };
        CHECK_THROWS_WITH(activation_checkpoint(fails, x).sum().backward(), "no such luck");
      }
      torch::manual_seed(3);
      Blocks blocks;
      blocks(input(), checkpointed).sum().backward();
      return blocks.gradients();
    });
  }
}

TEST_CASE("activation checkpoints on several threads", "[checkpointing]") {
  std::vector<Tensors> results(4);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < results.size(); ++i) {
    threads.emplace_back([&, i] {
      auto x = torch::full({100, 12}, static_cast<double>(i)).requires_grad_();
      for (int round = 0; round < 20; ++round) {
        x.mutable_grad().reset();
        activation_checkpoint(
            {.preserve_rng_state = false}, [](const torch::Tensor& y) { return y.sin().exp(); }, x)
            .sum()
            .backward();
      }
      results[i] = {x.grad(), x.sin().exp() * x.cos()};
    });
  }
  for (auto& thread : threads) thread.join();
  for (const Tensors& result : results) CHECK(torch::allclose(result[0], result[1]));
}

TEST_CASE("deeply nested backwards work after the first activation checkpoint", "[checkpointing]") {
  auto before = input();
  before.sin().sum().backward();  // Starts LibTorch's own engine.
  auto x = input();
  Nested::apply(activation_checkpoint([](const torch::Tensor& y) { return y.sin(); }, x), 100).sum().backward();
  CHECK(torch::equal(x.grad(), before.grad()));
}
