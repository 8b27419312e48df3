#include <torch/torch.h>

#include <sstream>

#include <ddpkit/error.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/train/optimizer_state.h>

#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"

using namespace ddpkit::train;
using ddpkit::DistributedDataParallel;
using ddpkit::optim::FusedAdamW;
using ddpkit::optim::FusedOptions;
using ddpkit::optim::ShardedOptimizer;

namespace {

torch::nn::Linear make_model(torch::ScalarType dtype) {
  torch::manual_seed(3);
  torch::nn::Linear model(50, 40);
  model->to(dtype);
  return model;
}

/// All ranks use the same batch, so the mean of their gradients equals each rank's gradient bit for bit.
template <class Forward, class Optimizer>
void train(Forward& forward, Optimizer& optimizer, torch::ScalarType dtype, std::int64_t from, std::int64_t to) {
  for (std::int64_t step = from; step < to; ++step) {
    torch::manual_seed(static_cast<std::uint64_t>(step));
    optimizer.zero_grad();
    forward(torch::randn({4, 50}, torch::kDouble).to(dtype)).square().mean().backward();
    optimizer.step();
  }
}

}  // namespace

RANK_TEST("a sharded optimizer's state goes through a state dict, master weights and all", "[optim][sharded][master]",
          2) {
  const ddpkit::testing::Folder made;
  const std::filesystem::path folder = group.all_gather_bytes(made.path().string())[0];
  const torch::optim::AdamWOptions options(1e-2);
  for (const auto dtype : {torch::kDouble, torch::kBFloat16}) {
    for (const bool shared : {false, true}) {
      INFO(dtype << ", shared weights " << shared);
      const FusedOptions fused{.master_weights = dtype == torch::kBFloat16};
      auto alone = make_model(dtype);
      FusedAdamW plain(alone->parameters(), options, fused);
      train(alone, plain, dtype, 0, 5);
      {
        auto model = make_model(dtype);
        DistributedDataParallel ddp(model, group);
        ShardedOptimizer<FusedAdamW> optimizer(ddp, options, {.shared_weights = shared}, fused);
        train(ddp, optimizer, dtype, 0, 5);
        CHECK(torch::equal(model->weight, alone->weight));
        CHECK_THROWS_WITH(optimizer_state(optimizer), ContainsSubstring("consolidate_state()"));
        optimizer.consolidate_state();
        if (group.rank() == 0)
          save_state_dict(folder / "state.pt",
                          StateDict{{"model", module_state(*model)}, {"optimizer", optimizer_state(optimizer)}});
        group.barrier();
      }
      const StateValue state = load_state_dict(folder / "state.pt");
      const StateDict& of_weight = state.to_dict().at("optimizer").to_dict().at("state").to_dict().at(0).to_dict();
      CHECK(of_weight.at("exp_avg").to_tensor().sizes() == alone->weight.sizes());
      CHECK(of_weight.contains("master_param") == fused.master_weights);

      auto model = make_model(dtype);
      DistributedDataParallel ddp(model, group);
      ShardedOptimizer<FusedAdamW> optimizer(ddp, torch::optim::AdamWOptions(7), {.shared_weights = shared}, fused);
      train(ddp, optimizer, dtype, 20, 22);  // The load below discards these steps.
      load_module_state(*model, state.to_dict().at("model").to_dict());
      load_optimizer_state(optimizer, state.to_dict().at("optimizer").to_dict());
      train(ddp, optimizer, dtype, 5, 10);
      train(alone, plain, dtype, 5, 10);
      CHECK(torch::equal(model->weight, alone->weight));
      CHECK(torch::equal(model->bias, alone->bias));
      group.barrier();
    }
  }
}

RANK_TEST("amsgrad of an archive replaces that of the sharded optimizer which loads it", "[optim][sharded]", 2) {
  for (const bool amsgrad : {false, true}) {
    INFO("amsgrad " << amsgrad);
    auto alone = make_model(torch::kDouble);
    FusedAdamW plain(alone->parameters(), torch::optim::AdamWOptions(1e-2).amsgrad(amsgrad));
    train(alone, plain, torch::kDouble, 0, 5);
    std::stringstream archive;
    torch::save(plain, archive);

    auto model = make_model(torch::kDouble);
    DistributedDataParallel ddp(model, group);
    ShardedOptimizer<FusedAdamW> optimizer(ddp, torch::optim::AdamWOptions(7).amsgrad(!amsgrad));
    train(ddp, optimizer, torch::kDouble, 20, 22);
    torch::load(optimizer, archive);
    {
      const torch::NoGradGuard no_grad;
      model->weight.copy_(alone->weight);
      model->bias.copy_(alone->bias);
    }
    train(ddp, optimizer, torch::kDouble, 5, 15);
    train(alone, plain, torch::kDouble, 5, 15);
    CHECK(torch::equal(model->weight, alone->weight));
    CHECK(torch::equal(model->bias, alone->bias));
  }
}
