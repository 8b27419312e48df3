// fully_shard(): modules that are sharded while the model is built.
#include <torch/torch.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/fully_sharded_data_parallel.h>

#include "ranks/comparisons.h"
#include "ranks/fully_sharded_models.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::FullyShardedDataParallel, ddpkit::FullyShardedOptions, ddpkit::InvalidArgument, ddpkit::ProcessGroup;
using ddpkit::optim::FusedAdamW, ddpkit::optim::ShardedOptimizer;
using ddpkit::testing::Gpt, ddpkit::testing::GptImpl, ddpkit::testing::loss_of, ddpkit::testing::token_ids;

namespace {

/// Trains a transformer whose blocks were sharded before. Returns its weights.
at::Tensor train_blocks(ProcessGroup& group, bool while_building, const FullyShardedOptions& options) {
  Gpt model(0, 16, 4);
  if (while_building) {
    // Blocks are built on all ranks, but the values are rank 0's.
    if (group.rank() != 0) {
      const at::NoGradGuard no_grad;
      for (auto& parameter : model->blocks->parameters()) parameter.fill_(7);
    }
    for (int i = 0; i < 4; ++i) ddpkit::fully_shard(*model->block(static_cast<std::size_t>(i)), group, options);
  }
  FullyShardedDataParallel fsdp(model, group, options);
  CHECK(fsdp.units().size() == 5);
  CHECK(fsdp.units()[3].name == "blocks.3");
  CHECK(fsdp.units()[4].name == "root");
  ShardedOptimizer<FusedAdamW> optimizer(fsdp, torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < 4; ++step) {
    const auto ids = token_ids(10 * step + group.rank());
    optimizer.zero_grad();
    torch::cross_entropy_loss(fsdp(ids).flatten(0, 1), ids.roll(1, 1).flatten()).backward();
    optimizer.clip_grad_norm(1);
    optimizer.step();
  }
  const auto whole = fsdp.whole();
  return ddpkit::testing::flat_parameters(*model).to(at::kFloat);
}

void check_same_training(ProcessGroup& group) {
  for (const auto& dtype : {std::optional<at::ScalarType>(), std::optional(at::kBFloat16)}) {
    const FullyShardedOptions options{.min_unit_mb = 0, .precision = {.param_dtype = dtype}};
    const at::Tensor expected = train_blocks(group, false, options), found = train_blocks(group, true, options);
    CHECK(torch::equal(found, expected));
  }
}

std::string error_in(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

RANK_TEST("a model whose blocks are sharded while it is built trains as one that is sharded later", "[fsdp]", 1, 2, 4) {
  check_same_training(group);
}

TEST_CASE("a model whose blocks are sharded while it is built trains the same through gloo", "[ranks][fsdp][gloo]") {
  ddpkit::testing::on_ranks("a model whose blocks are sharded while it is built trains the same through gloo", 2,
                            check_same_training, {.backend = "gloo"});
}

RANK_TEST("replicas of a model whose blocks are sharded while it is built", "[fsdp]", 4) {
  const FullyShardedOptions options{.min_unit_mb = 0, .replicas = 2};
  CHECK(torch::equal(train_blocks(group, true, options), train_blocks(group, false, options)));
}

RANK_TEST("a module that fully_shard() has sharded is used wrongly", "[fsdp]", 2) {
  Gpt model(0, 16, 2);
  const auto block = model->block(0);
  ddpkit::fully_shard(*block, group);
  CHECK_THAT(error_in([&] { loss_of(*model, token_ids(1)); }),
             ContainsSubstring("is sharded by fully_shard()") && ContainsSubstring("FullyShardedDataParallel"));
  CHECK_THAT(error_in([&] { ddpkit::fully_shard(*block, group); }), ContainsSubstring("is sharded already"));
  CHECK_THAT(error_in([&] { FullyShardedDataParallel(model, group, {.replicas = 2}); }),
             ContainsSubstring("module blocks.0 was sharded by fully_shard() over 2 ranks") &&
                 ContainsSubstring("needs 1 ranks"));
  block->up->weight.set_requires_grad(false);
  CHECK_THAT(error_in([&] { FullyShardedDataParallel(model, group); }),
             ContainsSubstring("blocks.0.up.weight was replaced, or its requires_grad was changed"));
  block->up->weight.set_requires_grad(true);
  FullyShardedDataParallel fsdp(model, group, {.min_unit_mb = 0});
  CHECK(fsdp(token_ids(1)).isfinite().all().item<bool>());
}
