// Writes to sharded parameters, replaced parameters, and uses that are refused.
#include <torch/torch.h>

#include <sstream>

#include <ddpkit/error.h>

#include "parallel/sharding/gathered_use.h"
#include "support/catch.h"
#include "unit/sharded_models.h"

using ddpkit::InvalidArgument, ddpkit::plan_units;
using ddpkit::testing::Gpt, ddpkit::testing::GptImpl, ddpkit::testing::loss_of, ddpkit::testing::ShardedModel;
using ddpkit::testing::token_ids;

namespace {

void check_same_weights(const torch::nn::Module& a, const torch::nn::Module& b) {
  const torch::NoGradGuard no_grad;
  const auto names = a.named_parameters().keys();
  for (std::size_t i = 0; i < names.size(); ++i) {
    INFO("parameter " << names[i]);
    CHECK(torch::equal(a.parameters()[i], b.parameters()[i]));
  }
}

}  // namespace

TEST_CASE("writes to sharded parameters reach the shards", "[fsdp]") {
  Gpt whole, sharded;
  ShardedModel shards(*sharded, {.window = 1, .rank = 1});
  const auto write = [](GptImpl& model) {
    const torch::NoGradGuard no_grad;
    torch::manual_seed(5);
    for (auto& parameter : model.parameters()) {
      parameter.clamp_(-0.02, 0.02);
      parameter.mul_(1.5);
    }
    torch::nn::init::normal_(model.block(2)->up->weight);
    model.block(1)->out->weight.select(0, 3).zero_();
    at::add_out(model.norm->bias, model.norm->bias, torch::ones({32}));
  };
  write(*whole);
  write(*sharded);
  shards.release();
  // The other ranks make the same writes.
  const auto names = sharded->parameters();
  shards.learn([&](const at::Tensor& parameter) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (names[i].is_same(parameter)) return whole->parameters()[i].detach();
    }
    return at::Tensor();
  });
  check_same_weights(*whole, *sharded);
}

TEST_CASE("within gather_all() writes that bypass the dispatcher reach the shards", "[fsdp]") {
  torch::nn::Sequential model(torch::nn::Linear(6, 5), torch::nn::Linear(5, 4));
  ShardedModel shards(*model, {.ranks = 2, .window = 1});
  shards.shards->gather_all();
  CHECK(shards.ranks->gathers == 2);
  auto& weight = model[0]->as<torch::nn::Linear>()->weight;
  weight.data_ptr<float>()[0] = 42;
  CHECK_THROWS_WITH(shards.release(), ContainsSubstring("end the scope of whole() before step()"));
  shards.shards->release_all();
  shards.release();
  CHECK(weight.flatten()[0].item<float>() == 42);
}

TEST_CASE("a sharded parameter that is used outside its scopes names unit and operation", "[fsdp]") {
  Gpt model;
  ShardedModel shards(*model, {.scope = false});
  CHECK_THROWS_AS(model->block(2)->up->weight.norm(), InvalidArgument);
  CHECK_THROWS_WITH(model->block(2)->up->weight.norm(),
                    ContainsSubstring("a parameter of unit blocks.2 is sharded over 2 ranks, and aten::"));
  CHECK_THROWS_WITH(model->norm->weight.add(1), ContainsSubstring("unit root") && ContainsSubstring("aten::add"));
  CHECK_THROWS_WITH(model->block(0)->up->clone(), ContainsSubstring("outside the forward pass and backward"));
  CHECK_THROWS_WITH(model->to(torch::kDouble), ContainsSubstring("outside the forward pass and backward"));
  CHECK(shards.ranks->gathers == 0);
  shards.shards->enter();
  const auto loss = loss_of(*model, token_ids(1));
  shards.shards->leave();
  loss.backward();                                                                // Backward needs no scope.
  CHECK_THROWS_WITH(model->norm->weight.add(1), ContainsSubstring("unit root"));  // Whole, but other ranks may not.
}

TEST_CASE("calls that bypass the dispatcher refuse a sharded parameter", "[fsdp]") {
  Gpt model;
  const ShardedModel shards(*model, {});
  CHECK_THROWS(model->norm->weight.data_ptr<float>());
  std::ostringstream file;
  CHECK_THROWS(torch::save(model, file));
}

TEST_CASE("torch::load and set_data into a sharded module are adopted", "[fsdp]") {
  torch::nn::Linear saved(6, 5), loaded(6, 5), set(6, 5);
  std::ostringstream file;
  torch::save(saved, file);
  const auto plan = [](const char* name, torch::nn::Linear& module) {
    return ddpkit::UnitPlan{.name = name, .parameters = {{"weight", module->weight}, {"bias", module->bias}}};
  };
  ShardedModel shards(std::vector{plan("loaded", loaded), plan("set", set)}, {.ranks = 1});
  std::istringstream input(file.str());
  torch::load(loaded, input);
  const auto x = torch::randn({2, 6});
  CHECK(torch::equal(loaded(x), saved(x)));  // At once.
  set->weight.set_data(saved->weight.detach().clone());
  set->bias.set_data(saved->bias.detach().t().clone());
  shards.shards->adopt();
  CHECK(torch::equal(set(x), saved(x)));
  for (const auto& module : {loaded, set}) {
    for (const auto& parameter : module->parameters()) CHECK(ddpkit::GatheredParameter::is_gathered(parameter));
  }
  shards.release();
  CHECK(torch::equal(loaded(x), saved(x)));
  CHECK(torch::equal(set(x), saved(x)));
  set->weight.set_data(torch::zeros({6, 5}));
  CHECK_THROWS_WITH(shards.shards->adopt(), ContainsSubstring("parameter weight is now [6, 5]"));
}

TEST_CASE("a tensor that set_() gives the memory of a sharded parameter gathers it too", "[fsdp]") {
  torch::nn::Linear model(6, 5);
  const auto weight = model->weight.detach().clone();
  ShardedModel shards(*model, {});
  at::Tensor other = torch::empty({0});
  other.set_(model->weight.detach());
  shards.release();
  CHECK(torch::equal(other, weight));
  CHECK(shards.ranks->gathers == 2);
}

TEST_CASE("the clone of a sharded module is whole and plain", "[fsdp]") {
  torch::nn::Linear model(6, 5);
  const auto weight = model->weight.detach().clone();
  const ShardedModel shards(*model, {});
  const auto clone = std::dynamic_pointer_cast<torch::nn::LinearImpl>(model->clone());
  CHECK(torch::equal(clone->weight, weight));
  CHECK_FALSE(ddpkit::GatheredParameter::is_gathered(clone->weight));
  CHECK(clone->weight.data_ptr<float>() != nullptr);
}

TEST_CASE("a parameter refuses all uses after its shards have been destroyed", "[fsdp]") {
  torch::nn::Linear model(6, 5);
  at::Tensor view;
  {
    const ShardedModel shards(*model, {});
    view = model->weight.detach();
    model->weight.sum();
  }
  CHECK_THROWS_WITH(model(torch::randn({2, 6})), ContainsSubstring("FullyShardedDataParallel has been destroyed"));
  CHECK_THROWS_WITH(view.sum(), ContainsSubstring("FullyShardedDataParallel has been destroyed"));
}

TEST_CASE("units are the children of lists, or modules by name", "[fsdp]") {
  const auto names_of = [](const std::vector<ddpkit::UnitPlan>& units) {
    std::vector<std::string> names;
    for (const auto& unit : units) names.push_back(unit.name);
    return names;
  };
  using Names = std::vector<std::string>;
  Gpt model(0, 32, 3);
  CHECK(names_of(plan_units(*model, {}, 0)) == Names{"blocks.0", "blocks.1", "blocks.2", "root"});
  CHECK(names_of(plan_units(*model, {"blocks.*.up", "tokens"}, 0)) ==
        Names{"tokens", "blocks.0.up", "blocks.1.up", "blocks.2.up", "root"});
  const std::size_t block = 4 * (12 * 32 * 32 + 13 * 32);
  CHECK(names_of(plan_units(*model, {}, block)) == Names{"blocks.0", "blocks.1", "blocks.2", "root"});
  CHECK(names_of(plan_units(*model, {}, block + 1)) == Names{"blocks.0 to blocks.1", "blocks.2", "root"});
  CHECK_THROWS_WITH(plan_units(*model, {"block.*"}, 0), ContainsSubstring("units has \"block.*\""));
  // A parameter belongs to the innermost unit.
  const auto nested = plan_units(*model, {"blocks.0", "blocks.0.up"}, 0);
  CHECK(names_of(nested) == Names{"blocks.0", "blocks.0.up", "root"});
  CHECK(nested[0].parameters.size() == 10);
  CHECK(nested[1].parameters.size() == 2);
}
