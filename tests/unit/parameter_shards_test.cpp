// Training with parameters that are gathered when they are used, compared bit by bit with the same model as a whole.
#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <thread>

#include <ddpkit/parallel/activation_checkpoint.h>

#include "parallel/sharding/gathered_use.h"
#include "support/catch.h"
#include "unit/sharded_models.h"

using ddpkit::testing::Block, ddpkit::testing::BlockImpl, ddpkit::testing::Gpt, ddpkit::testing::GptImpl;
using ddpkit::testing::loss_of, ddpkit::testing::ShardedModel, ddpkit::testing::token_ids;

namespace {

void check_same_gradients(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto names = a.named_parameters().keys();
  for (std::size_t i = 0; i < names.size(); ++i) {
    INFO("parameter " << names[i]);
    const auto one = a.parameters()[i].grad(), other = b.parameters()[i].grad();
    REQUIRE(one.defined() == other.defined());
    if (one.defined()) CHECK(torch::equal(one, other));
  }
}

/// A transformer and a sharded copy.
struct Pair {
  explicit Pair(double dropout = 0) : whole(dropout), sharded(dropout) {}
  void zero_grad() {
    for (auto* model : {&whole, &sharded}) (*model)->zero_grad();
  }
  /// Runs `train` with each model.
  void check(const std::function<void(GptImpl&)>& train) {
    for (auto* model : {&whole, &sharded}) {
      torch::manual_seed(11);
      train(**model);
    }
    check_same_gradients(*whole, *sharded);
  }
  void check_step() {
    check([](GptImpl& model) { loss_of(model, token_ids(1)).backward(); });
  }
  Gpt whole, sharded;
};

at::Tensor under_autocast(GptImpl& model, const at::Tensor& ids, bool cache = true) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::set_autocast_cache_enabled(cache);
  at::autocast::increment_nesting();
  auto loss = loss_of(model, ids);
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::set_autocast_cache_enabled(true);
  return loss;
}

at::Tensor run_checkpointed(const std::shared_ptr<BlockImpl>& block, const at::Tensor& x) {
  return ddpkit::activation_checkpoint([block](const at::Tensor& y) { return block->forward(y); }, x);
}

}  // namespace

TEST_CASE("sharded parameters give the same gradients on any number of ranks", "[fsdp]") {
  for (const int ranks : {1, 2, 3, 8}) {
    for (const std::size_t window : {1, 2, 3}) {
      for (const int rank : {0, ranks - 1}) {
        for (const std::size_t prefetch : {std::size_t{0}, window - 1}) {
          INFO(ranks << " ranks, window " << window << ", prefetch " << prefetch << ", rank " << rank);
          Pair pair;
          ShardedModel sharded(*pair.sharded, {.ranks = ranks, .window = window, .prefetch = prefetch, .rank = rank});
          for (int step = 0; step < 3; ++step) {
            pair.zero_grad();
            sharded.train([&] { pair.check([&](GptImpl& model) { loss_of(model, token_ids(step)).backward(); }); });
            // 6 blocks and the root in forward; in backward the blocks that have been released.
            CHECK(sharded.ranks->gathers == 13 - static_cast<int>(window));
            CHECK(sharded.shards->whole() == window);
            sharded.release();
            CHECK(sharded.shards->whole() == 0);
          }
          CHECK(sharded.shards->most_whole() == window);
        }
      }
    }
  }
}

TEST_CASE("sharded units that are used twice, released in between, tied or frozen", "[fsdp]") {
  SECTION("each block runs twice in a row") {
    Pair pair;
    pair.whole->twice = pair.sharded->twice = true;
    ShardedModel sharded(*pair.sharded, {});
    pair.check_step();
    CHECK(sharded.ranks->gathers == 11);
  }
  SECTION("the root is released too") {
    Pair pair;
    ShardedModel sharded(*pair.sharded, {.keeps_root = false});
    pair.check_step();
    CHECK(sharded.ranks->gathers == 13);
  }
  SECTION("two units share a layer") {
    Pair pair;
    for (auto* model : {&pair.whole, &pair.sharded}) {
      (*model)->block(3)->up = (*model)->block(0)->up;
      (*model)->block(3)->replace_module("up", (*model)->block(0)->up);
    }
    ShardedModel sharded(*pair.sharded, {});
    pair.check_step();
  }
  SECTION("frozen blocks between trained ones") {
    Pair pair;
    for (auto* model : {&pair.whole, &pair.sharded}) {
      for (const std::size_t i : {0, 2, 3}) {
        for (auto& parameter : (*model)->block(i)->parameters()) parameter.set_requires_grad(false);
      }
    }
    ShardedModel sharded(*pair.sharded, {});
    pair.check_step();
  }
}

TEST_CASE("one operation may use more sharded units than the window has", "[fsdp]") {
  Pair pair;
  ShardedModel sharded(*pair.sharded, {.window = 1});
  const torch::NoGradGuard no_grad;
  const auto sum = [](Gpt& model) { return model->block(0)->up->weight + model->block(4)->up->weight; };
  CHECK(torch::equal(sum(pair.whole), sum(pair.sharded)));
  const auto expected = at::_foreach_norm(pair.whole->parameters()),
             found = at::_foreach_norm(pair.sharded->parameters());
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(torch::equal(expected[i], found[i]));
  CHECK(sharded.shards->most_whole() == 6);
  CHECK(sharded.shards->whole() == 1);
}

TEST_CASE("sharded parameters in evaluation", "[fsdp]") {
  Pair pair;
  ShardedModel sharded(*pair.sharded, {});
  for (auto* model : {&pair.whole, &pair.sharded}) (*model)->eval();
  {
    const torch::NoGradGuard no_grad;
    CHECK(torch::equal(pair.whole->forward(token_ids(1)), pair.sharded->forward(token_ids(1))));
  }
  {
    const torch::InferenceMode inference;
    CHECK(torch::equal(pair.whole->forward(token_ids(1)), pair.sharded->forward(token_ids(1))));
  }
  // Memory that was gathered in inference mode is no inference tensor.
  pair.check_step();
}

TEST_CASE("sharded parameters where gathers are not possible", "[fsdp]") {
  Pair pair;
  ShardedModel sharded(*pair.sharded, {});
  {
    const ddpkit::NoGathers no_gathers("no gather is possible here");
    CHECK_THROWS_WITH(loss_of(*pair.sharded, token_ids(1)), ContainsSubstring("no gather is possible here"));
    loss_of(*pair.whole, token_ids(1));
  }
  CHECK(sharded.ranks->gathers == 0);
  pair.check_step();
}

TEST_CASE("sharded parameters after exceptions", "[fsdp]") {
  Pair pair;
  ShardedModel sharded(*pair.sharded, {});
  pair.sharded->throws_at = 4;
  CHECK_THROWS(loss_of(*pair.sharded, token_ids(1)));
  pair.sharded->throws_at = -1;
  pair.check_step();
  pair.zero_grad();
  const auto loss = loss_of(*pair.sharded, token_ids(1));
  sharded.release();
  sharded.ranks->fails_next = true;
  CHECK_THROWS_WITH(loss.backward(), ContainsSubstring("the gather failed"));
  pair.zero_grad();
  pair.check_step();
  sharded.release();  // Throws if a unit is still in use.
  CHECK(sharded.shards->whole() == 0);
}

namespace {

/// Saves a weight for backward.
struct Product : torch::autograd::Function<Product> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x.matmul(weight.t());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].matmul(saved[1]), gradients[0].flatten(0, -2).t().matmul(saved[0].flatten(0, -2))};
  }
};

}  // namespace

TEST_CASE("autograd functions, hooks and views of sharded parameters", "[fsdp]") {
  torch::nn::Linear whole(8, 6), sharded(8, 6);
  {
    const torch::NoGradGuard no_grad;
    sharded->weight.copy_(whole->weight);
  }
  ShardedModel shards(std::vector<ddpkit::UnitPlan>{{.name = "w", .parameters = {{"weight", sharded->weight}}},
                                                    {.name = "b", .parameters = {{"bias", sharded->bias}}}},
                      {.ranks = 3, .window = 1});
  const auto x = torch::randn({2, 5, 8}).requires_grad_();
  int calls = 0;
  for (auto* weight : {&whole->weight, &sharded->weight})
    weight->register_hook([&](const at::Tensor& gradient) {
      ++calls;
      return gradient * 2;
    });
  const auto kept = sharded->weight.detach();
  for (auto* weight : {&whole->weight, &sharded->weight}) (Product::apply(x, *weight) * 3).sum().backward();
  shards.release();
  CHECK(torch::equal(whole->weight.grad(), sharded->weight.grad()));
  CHECK(calls == 2);
  CHECK(torch::equal(kept, whole->weight));  // Gathers again.
}

TEST_CASE("a gradient penalty through sharded parameters", "[fsdp]") {
  Pair pair;
  ShardedModel sharded(*pair.sharded, {.window = 1});
  pair.check([](GptImpl& model) {
    const auto x = torch::randn({2, 8, 32}).requires_grad_();
    const auto y = model.block(0)->down(torch::gelu(model.block(1)->up(x))).pow(2).sum();
    torch::autograd::grad({y}, {x}, {}, true, true)[0].pow(2).sum().backward();
  });
}

TEST_CASE("sharded parameters under autocast", "[fsdp]") {
  for (const bool cache : {true, false}) {
    Pair pair;
    ShardedModel sharded(*pair.sharded, {.window = 1});
    pair.check([&](GptImpl& model) { under_autocast(model, token_ids(1), cache).backward(); });
  }
}

namespace {

struct ManyKinds : torch::nn::Module {
  ManyKinds() {
    torch::manual_seed(4);
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).padding(1)));
    norm = register_module("norm", torch::nn::BatchNorm2d(4));
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(32, 8).num_layers(2).bidirectional(true)));
    gru = register_module("gru", torch::nn::GRU(16, 8));
    attention = register_module("attention", torch::nn::MultiheadAttention(8, 2));
    layers = register_module("layers", torch::nn::Sequential(torch::nn::Linear(8, 8), torch::nn::ReLU(),
                                                             torch::nn::Linear(8, 5), torch::nn::PReLU()));
    bag = register_module("bag", torch::nn::EmbeddingBag(7, 5));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = torch::relu(norm(conv(x))).permute({2, 0, 1, 3}).flatten(2);
    y = std::get<0>(gru(std::get<0>(lstm(y))));
    y = std::get<0>(attention(y, y, y));
    return layers->forward(y).mean(0) + bag(torch::arange(6).view({3, 2}));
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::GRU gru{nullptr};
  torch::nn::MultiheadAttention attention{nullptr};
  torch::nn::Sequential layers{nullptr};
  torch::nn::EmbeddingBag bag{nullptr};
};

}  // namespace

TEST_CASE("many kinds of layers as sharded units", "[fsdp]") {
  const auto whole = std::make_shared<ManyKinds>(), sharded = std::make_shared<ManyKinds>();
  const ShardedModel shards(*sharded, {.window = 1, .units = {"*"}});
  CHECK(shards.units.size() == 7);
  const auto x = torch::randn({3, 1, 6, 8});
  for (const auto& model : {whole, sharded}) model->forward(x).pow(2).sum().backward();
  check_same_gradients(*whole, *sharded);
}

TEST_CASE("forward and backward of sharded parameters on two threads", "[fsdp]") {
  Pair pair;
  const ShardedModel sharded(*pair.sharded, {});
  pair.check([](GptImpl& model) {
    at::Tensor loss;
    std::thread([&] { loss = loss_of(model, token_ids(1)); }).join();
    std::thread([&] { loss.backward(); }).join();
  });
}

TEST_CASE("activation checkpoints of sharded blocks", "[fsdp]") {
  for (const std::size_t window : {1, 2}) {
    INFO("window " << window);
    Pair pair(0.3);
    pair.sharded->call = run_checkpointed;
    const ShardedModel sharded(*pair.sharded, {.window = window});
    pair.check_step();
    CHECK(sharded.ranks->gathers == 13 - static_cast<int>(window));
    pair.zero_grad();
    pair.check([](GptImpl& model) { under_autocast(model, token_ids(1)).backward(); });
  }
  SECTION("nested") {
    Pair pair(0.3);
    pair.sharded->call = [](const std::shared_ptr<BlockImpl>& block, const at::Tensor& x) {
      return ddpkit::activation_checkpoint([block](const at::Tensor& y) { return run_checkpointed(block, y); }, x);
    };
    const ShardedModel sharded(*pair.sharded, {.window = 1});
    pair.check_step();
  }
  SECTION("a recomputation throws") {
    Pair pair;
    int calls = 0;
    pair.sharded->call = [&](const std::shared_ptr<BlockImpl>& block, const at::Tensor& x) {
      const auto run = [block, &calls](const at::Tensor& y) {
        if (++calls == 8) throw std::runtime_error("the recomputation failed");
        return block->forward(y);
      };
      return ddpkit::activation_checkpoint(run, x);
    };
    ShardedModel sharded(*pair.sharded, {.window = 1});
    CHECK_THROWS(loss_of(*pair.sharded, token_ids(1)).backward());
    pair.zero_grad();
    pair.check_step();
    sharded.release();
  }
  SECTION("two backwards through one graph") {
    Pair pair;
    pair.sharded->call = run_checkpointed;
    const ShardedModel sharded(*pair.sharded, {.window = 1});
    pair.check([](GptImpl& model) {
      const auto loss = loss_of(model, token_ids(1));
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
    });
  }
}
