// Units that are gathered ahead, in the order of the last step.
#include <torch/torch.h>

#include <functional>
#include <vector>

#include "parallel/sharding/unit_order.h"
#include "support/catch.h"
#include "unit/sharded_models.h"

using ddpkit::UnitOrder, ddpkit::testing::Gpt, ddpkit::testing::loss_of, ddpkit::testing::ShardedModel;
using ddpkit::testing::token_ids;

namespace {

using Units = std::vector<std::size_t>;

constexpr std::size_t kRoot = 6;
constexpr int kGathers = 11;  ///< In a step without wrong guesses: root, 6 blocks forward, 4 backward.

/// A transformer of 6 blocks whose next unit is gathered ahead, and a copy that is not sharded.
struct Model {
  explicit Model(const ShardedModel::Options& options = {.prefetch = 1}) : units(*sharded, options) {}

  /// Checks the gradients. Returns the number of gathers.
  int train(int step = 0) {
    for (auto* model : {&whole, &sharded}) (*model)->zero_grad();
    loss_of(*whole, token_ids(step)).backward();
    units.train([&] { loss_of(*sharded, token_ids(step)).backward(); });
    CHECK(units.shards->whole() <= 2);
    units.release();
    CHECK(units.ranks->in_flight == 0);
    for (std::size_t i = 0; i < whole->parameters().size(); ++i)
      CHECK(torch::equal(whole->parameters()[i].grad(), sharded->parameters()[i].grad()));
    return units.ranks->gathers;
  }
  void swap(bool swaps) { whole->swaps = sharded->swaps = swaps; }

  Gpt whole, sharded;
  ShardedModel units;
};

}  // namespace

TEST_CASE("the order of units is expected again, forward and backward, and follows changes", "[fsdp]") {
  UnitOrder order;
  const auto use = [&](const Units& units) {
    order.begin_pass();
    for (const std::size_t unit : units) order.note(unit);
  };
  CHECK(order.predict(2).empty());
  use({0, 1, 2, 1, 0});
  CHECK(order.predict(3).empty());  // Nothing is known of a pass after the backward.
  order.begin_pass();
  CHECK(order.predict(9) == Units{0, 1, 2, 1, 0});
  order.note(0);
  order.note(1);
  CHECK(order.predict(1) == Units{2});
  order.note(2);
  order.note(1);
  CHECK(order.predict(1) == Units{0});
  use({0, 2, 1, 2, 0});
  order.begin_pass();
  CHECK(order.predict(3) == Units{0, 2, 1});
}

TEST_CASE("a sharded unit is gathered while the one before is in use", "[fsdp]") {
  Model model;
  CHECK(model.train(0) == kGathers);
  const std::vector<Units> one_by_one{{kRoot}, {0}, {1}, {2}, {3}, {4}, {5}, {3}, {2}, {1}, {0}};
  CHECK(model.units.ranks->wanted == one_by_one);
  for (int step = 1; step < 3; ++step) {
    CHECK(model.train(step) == kGathers);
    CHECK(model.units.ranks->used == Units{kRoot, 0, 1, 2, 3, 4, 4, 3, 2, 1});
    CHECK(model.units.ranks->wanted == std::vector<Units>{{kRoot, 0}, {1}, {2}, {3}, {4}, {5}, {3}, {2}, {1}, {0}});
  }
  CHECK(model.units.shards->most_whole() == 2);
}

TEST_CASE("several sharded units are gathered ahead", "[fsdp]") {
  Gpt model;
  ShardedModel sharded(*model, {.window = 3, .prefetch = 2});
  for (int step = 0; step < 2; ++step) {
    sharded.train([&] { loss_of(*model, token_ids(step)).backward(); });
    sharded.release();
  }
  CHECK(sharded.shards->most_whole() == 3);
  CHECK(sharded.ranks->wanted == std::vector<Units>{{kRoot, 0, 1}, {2}, {3}, {4}, {5}, {2}, {1}, {0}});
}

TEST_CASE("sharded units in another order are gathered on demand, and ahead from the next step on", "[fsdp]") {
  Model model;
  for (int round = 0; round < 2; ++round) {
    for (const bool swaps : {false, true}) {
      INFO("round " << round << ", swaps " << swaps);
      model.swap(swaps);
      model.train();
      CHECK(model.train() == kGathers);
      CHECK(model.units.ranks->wanted.size() == kGathers - 1);
    }
  }
  CHECK(model.units.shards->most_whole() == 2);
  // Only the second and third blocks are guessed wrong after the change.
  model.swap(false);
  CHECK(model.train() <= kGathers + 3);
}

TEST_CASE("no sharded unit is gathered ahead that other ranks do not expect", "[fsdp]") {
  Model model;
  model.train();
  model.train();
  CHECK(std::exchange(model.units.ranks->ahead, 0) > 0);
  model.units.ranks->others_expect_other = true;
  CHECK(model.train() == kGathers);
  CHECK(model.units.ranks->ahead == 0);
  model.units.ranks->others_expect_other = false;
  CHECK(model.train() == kGathers);
  CHECK(model.units.ranks->wanted.size() == kGathers - 1);
}

TEST_CASE("exceptions while a sharded unit is gathered ahead", "[fsdp]") {
  Model model;
  model.train();
  model.sharded->throws_at = 3;
  CHECK_THROWS(model.units.train([&] { loss_of(*model.sharded, token_ids(1)); }));
  CHECK(model.units.ranks->in_flight == 1);  // Block 3.
  model.sharded->throws_at = -1;
  model.train();
  CHECK(model.train() == kGathers);
  model.units.ranks->fails_to_end = true;
  CHECK_THROWS_WITH(model.units.train([&] { loss_of(*model.sharded, token_ids(1)); }),
                    ContainsSubstring("the gather did not end"));
  model.train();
  CHECK(model.train() == kGathers);
}

TEST_CASE("a sharded unit that is gathered ahead has the values of its parameter's new memory", "[fsdp]") {
  Model model;
  model.train();
  // Block 3 is being gathered when it is replaced.
  model.sharded->throws_at = 3;
  CHECK_THROWS(model.units.train([&] { loss_of(*model.sharded, token_ids(1)); }));
  REQUIRE(model.units.ranks->in_flight == 1);
  model.sharded->throws_at = -1;
  const auto values = torch::randn({32});
  model.sharded->block(3)->norm1->weight.set_data(values.clone());
  model.units.shards->adopt();
  CHECK(torch::equal(model.sharded->block(3)->norm1->weight.detach(), values));
}

TEST_CASE("within gather_all() one rank may use sharded units in any order", "[fsdp]") {
  Model model;
  model.train();
  model.units.shards->gather_all();
  model.units.ranks->wanted.clear();
  const torch::NoGradGuard no_grad;
  for (const std::size_t i : {4, 1, 5, 0}) CHECK(model.sharded->block(i)->up->weight.isfinite().all().item<bool>());
  CHECK(model.units.ranks->wanted.empty());
  model.units.shards->release_all();
  model.units.release();
  const torch::AutoGradMode grad(true);
  CHECK(model.train() == kGathers);
}
