// What FullyShardedDataParallel refuses, and how it fails.
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <sstream>

#include <ddpkit/error.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/comm_hooks.h>
#include <ddpkit/parallel/fully_sharded_data_parallel.h>
#include <ddpkit/parallel/join.h>

#include "parallel/join.h"
#include "ranks/comparisons.h"
#include "ranks/fully_sharded_models.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::CollectiveMismatch, ddpkit::InvalidArgument, ddpkit::PeerLost, ddpkit::ProcessGroup;
using ddpkit::FullyShardedDataParallel, ddpkit::FullyShardedOptions;
using ddpkit::optim::FusedAdamW, ddpkit::optim::ShardedOptimizer;
using ddpkit::testing::backward_alone, ddpkit::testing::largest_difference, ddpkit::testing::LossModel;
using ddpkit::testing::maker, ddpkit::testing::Mlp, ddpkit::testing::Transformer;

namespace {

const FullyShardedOptions kSmallUnits{.min_unit_mb = 0};

at::Tensor input_of(const LossModel& model, const ProcessGroup& group, int step = 0) {
  return model.input(step, group.rank(), at::kDouble);
}

/// A transformer, its wrapper and its optimizer.
struct Job {
  explicit Job(ProcessGroup& group, const std::function<void(Transformer&)>& change = {})
      : model(std::dynamic_pointer_cast<Transformer>(maker<Transformer>(at::kDouble, change)())),
        fsdp(model, group, kSmallUnits),
        optimizer(fsdp, torch::optim::AdamWOptions(1e-2)) {}
  void backward(int step = 0) {
    optimizer.zero_grad();
    fsdp(input_of(*model, fsdp.group(), step)).backward();
  }
  void train(int step = 0) {
    backward(step);
    optimizer.step();
  }
  std::shared_ptr<Transformer> model;
  FullyShardedDataParallel<Transformer> fsdp;
  ShardedOptimizer<FusedAdamW> optimizer;
};

/// Rank 1 uses two blocks in another order, after `steps` steps with the order of rank 0.
void check_mismatch_after(ProcessGroup& group, int steps) {
  const std::string text = [&] {
    try {
      Job job(group);
      for (int step = 0; step < steps; ++step) job.train();
      job.model->gpt->swaps = group.rank() == 1;
      job.train();
    } catch (const CollectiveMismatch& error) {
      CHECK(error.context().rank == 1);
      return std::string(error.what());
    }
    return std::string("no error");
  }();
  INFO(text);
  CHECK(text.find("rank 0 uses unit gpt.blocks.1 and rank 1 uses unit gpt.blocks.2") != std::string::npos);
}

void check_mismatch(ProcessGroup& group) { check_mismatch_after(group, 0); }
/// Rank 0 has the next block already, and gathers the one after it.
void check_mismatch_ahead(ProcessGroup& group) { check_mismatch_after(group, 2); }

}  // namespace

RANK_TEST("fully sharded blocks of one size in another order on one rank are an error", "[fsdp]", 2, 3) {
  check_mismatch(group);
}

TEST_CASE("fully sharded blocks in another order through gloo are an error", "[ranks][fsdp][gloo]") {
  ddpkit::testing::on_ranks("fully sharded blocks in another order through gloo are an error", {2, 3}, check_mismatch,
                            {.backend = "gloo"});
}

TEST_CASE("fully sharded blocks in another order while units are gathered ahead are an error", "[ranks][fsdp][gloo]") {
  ddpkit::testing::on_ranks("fully sharded blocks in another order while units are gathered ahead are an error", {2, 3},
                            check_mismatch_ahead, {.backend = "gloo"});
}

RANK_TEST("a rank that skips a step of a fully sharded model is an error", "[fsdp]", 2, 3) {
  Job job(group);
  job.train();
  job.backward(1);
  if (group.rank() != 1) job.optimizer.step();
  CHECK_THROWS_WITH(job.backward(2), ContainsSubstring("optimizer steps and rank 1 after "));
}

RANK_TEST("a rank without a backward of a fully sharded model is an error", "[fsdp]", 2, 3) {
  const auto model = maker<Mlp>(at::kDouble)();
  FullyShardedDataParallel fsdp(model, group, {.min_unit_mb = 0, .reshard_after_forward = false});
  ShardedOptimizer<FusedAdamW> optimizer(fsdp, torch::optim::AdamWOptions(1e-2));
  const auto train = [&] {
    const at::Tensor loss = fsdp(input_of(*model, group));
    if (group.rank() != 1) loss.backward();
    optimizer.step();
    fsdp(input_of(*model, group));
  };
  CHECK_THROWS_WITH(train(), ContainsSubstring("rank 0 is at the end of backward and rank 1 uses unit"));
}

RANK_TEST("the use of a fully sharded parameter outside forward is an error on its rank alone", "[fsdp]", 2) {
  Job job(group);
  job.train();
  if (group.rank() == 0) {
    const auto& weight = job.model->gpt->block(1)->up->weight;
    CHECK_THROWS_AS(weight.norm(), InvalidArgument);
    CHECK_THROWS_WITH(weight.norm(), ContainsSubstring("a parameter of unit gpt.blocks.1 is sharded over 2 ranks, and "
                                                       "aten::") &&
                                         ContainsSubstring("gathering()"));
    std::ostringstream file;
    CHECK_THROWS(torch::save(job.model, file));
  }
  job.train(1);
  {
    const auto scope = job.fsdp.gathering();
    const double norm = job.model->gpt->block(1)->up->weight.norm().item<double>();
    CHECK(norm > 0);
    const double expected = job.model->gpt->norm->weight.sum().item<double>();
    CHECK(expected > 0);
  }
  {
    const auto scope = job.fsdp.whole();
    if (group.rank() == 0) {  // No communication.
      const torch::NoGradGuard no_grad;
      CHECK(job.model->forward(input_of(*job.model, group)).isfinite().item<bool>());
    }
  }
  job.train(2);
  {
    FusedAdamW wrong(job.model->parameters(), torch::optim::AdamWOptions(1));
    job.model->gpt->norm->weight.mutable_grad() = torch::ones({16}, at::kDouble);
    CHECK_THROWS_WITH(wrong.step(), ContainsSubstring("is sharded by FullyShardedDataParallel"));
    job.model->zero_grad();
  }
  const auto scope = job.fsdp.whole();
  CHECK_THROWS_WITH(job.train(3), ContainsSubstring("end the scope of whole() before step()"));
}

RANK_TEST("writes to fully sharded parameters within scopes, and torch::load, reach all ranks", "[fsdp]", 1, 2, 3) {
  Job job(group);
  const auto alone = maker<Transformer>(at::kDouble)();
  FusedAdamW optimizer(alone->parameters(), torch::optim::AdamWOptions(1e-2));
  const auto train = [&](int step) {
    optimizer.zero_grad();
    backward_alone(*alone, step, group.world_size(), group.rank(), at::kDouble);
    optimizer.step();
    job.train(step);
  };
  const auto check = [&] {
    const auto whole = job.fsdp.whole();
    CHECK(largest_difference(ddpkit::testing::flat_parameters(*job.model), ddpkit::testing::flat_parameters(*alone)) <
          1e-10);
  };
  const auto clamp = [](torch::nn::Module& module) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : module.parameters()) parameter.clamp_(-0.01, 0.01);
  };
  train(0);
  {
    const auto scope = job.fsdp.gathering();
    clamp(*job.model);
  }
  clamp(*alone);
  check();
  train(1);
  {
    const auto whole = job.fsdp.whole();
    job.model->gpt->norm->weight.data_ptr<double>()[0] = 3;
  }
  alone->as<Transformer>()->gpt->norm->weight.data_ptr<double>()[0] = 3;
  check();
  train(2);
  // Loading keeps the memory that torch::load() has given to the parameters until the next use.
  std::stringstream file;
  const auto other = maker<Transformer>(at::kDouble, [&](Transformer& model) { clamp(model); })();
  torch::save(other, file);
  {
    const auto whole = job.fsdp.whole();
    torch::load(job.model, file);
  }
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < alone->parameters().size(); ++i) alone->parameters()[i].copy_(other->parameters()[i]);
  }
  check();
  train(3);
  check();
}

RANK_TEST("torch::save within whole() writes the fully sharded weights", "[fsdp]", 1, 2) {
  Job job(group);
  job.train();
  std::stringstream file;
  const auto whole = job.fsdp.whole();
  torch::save(job.model, file);
  const auto loaded = std::dynamic_pointer_cast<Transformer>(maker<Transformer>(at::kDouble)());
  auto target = loaded;
  torch::load(target, file);
  CHECK(torch::equal(ddpkit::testing::flat_parameters(*loaded), ddpkit::testing::flat_parameters(*job.model)));
}

TEST_CASE("after an exception in forward on all ranks the next fully sharded step is right", "[ranks][fsdp]") {
  const auto body = [](ProcessGroup& group) {
    Job job(group);
    const auto alone = maker<Transformer>(at::kDouble)();
    FusedAdamW optimizer(alone->parameters(), torch::optim::AdamWOptions(1e-2));
    for (int step = 0; step < 4; ++step) {
      if (step % 2 == 0) {  // From the second time on, block 2 is being gathered.
        job.model->gpt->throws_at = 2;
        CHECK_THROWS_WITH(job.backward(), ContainsSubstring("forward failed"));
        job.model->gpt->throws_at = -1;
      }
      optimizer.zero_grad();
      backward_alone(*alone, step, group.world_size(), group.rank(), at::kDouble);
      optimizer.step();
      job.train(step);
    }
    const auto whole = job.fsdp.whole();
    CHECK(largest_difference(ddpkit::testing::flat_parameters(*job.model), ddpkit::testing::flat_parameters(*alone)) <
          1e-10);
  };
  for (const char* backend : {"shm", "gloo"})
    ddpkit::testing::on_ranks("after an exception in forward on all ranks the next fully sharded step is right",
                              {1, 2, 3}, body, {.backend = backend});
}

namespace {

/// Training in which rank 1 fails in forward, or in a backward hook of block 2, at the second step.
void check_failure(ProcessGroup& group, bool in_backward, const std::function<void()>& fail) {
  try {
    Job job(group);
    job.train();
    const auto block = job.model->gpt->block(2);
    if (group.rank() == 1 && in_backward) block->out->bias.register_hook([&](const at::Tensor&) { fail(); });
    if (group.rank() == 1 && !in_backward) {
      job.model->gpt->call = [&](const auto& one, const at::Tensor& x) {
        if (one == block) fail();
        return one->forward(x);
      };
    }
    job.train(1);
    job.train(2);
    FAIL("no error");
  } catch (const PeerLost& error) {
    INFO(error.what());
    CHECK(group.rank() != 1);
    // A rank that waits for gradients may learn it from the abort of a rank that waited in a gather.
    CHECK((error.context().rank == 1 || std::string(error.what()).find("rank 1 ") != std::string::npos));
  } catch (const std::exception& error) {
    INFO(error.what());
    CHECK(group.rank() == 1);
  }
}

}  // namespace

TEST_CASE("a rank that dies or fails in a fully sharded step is named", "[ranks][fsdp][kill]") {
  for (const char* backend : {"shm", "gloo"}) {
    for (const bool in_backward : {false, true}) {
      INFO(backend << ", in backward " << in_backward);
      ddpkit::testing::on_ranks(
          "a rank that dies or fails in a fully sharded step is named", 3,
          [&](ProcessGroup& group) { check_failure(group, in_backward, [] { ::kill(::getpid(), SIGKILL); }); },
          {.backend = backend, .doomed = {1}});
      ddpkit::testing::on_ranks("a rank that dies or fails in a fully sharded step is named", 3,
                                [&](ProcessGroup& group) {
                                  check_failure(group, in_backward, [] { throw std::runtime_error("it failed"); });
                                },
                                {.backend = backend});
    }
  }
}

RANK_TEST("FullyShardedDataParallel refuses what it does not support", "[fsdp]", 1, 2) {
  const auto mlp = [] { return std::make_shared<Mlp>(); };
  const auto refuses = [&](const std::shared_ptr<Mlp>& model, const FullyShardedOptions& options, const char* text) {
    CHECK_THROWS_AS((FullyShardedDataParallel(model, group, options)), InvalidArgument);
    CHECK_THROWS_WITH((FullyShardedDataParallel(model, group, options)), ContainsSubstring(text));
  };
  refuses(mlp(), {.min_unit_mb = -1}, "min_unit_mb is -1 MiB");
  refuses(mlp(), {.prefetch = -1}, "prefetch is -1 units");
  refuses(mlp(), {.units = {"blocks.*"}}, "units has \"blocks.*\"");
  auto model = mlp();
  const at::Tensor view = model->layers[0]->as<torch::nn::Linear>()->weight.detach();
  refuses(model, {}, "parameter layers.0.weight shares its memory with another tensor");
  model = mlp();
  model->register_parameter("spread", torch::zeros({3, 1}).expand({3, 4}).slice(1, 0, 4, 2));
  refuses(model, {}, "parameter spread is not dense in memory");
  model = mlp();
  model->register_module("sparse", torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 3).sparse(true)));
  refuses(model, {}, "the gradient of parameter sparse.weight is sparse");

  if (group.world_size() > 1) {
    model = mlp();
    if (group.rank() == 1) {
      auto& weight = model->layers[2]->as<torch::nn::Linear>()->weight;
      weight.set_data(weight.detach().t().contiguous().t());
    }
    refuses(model, {}, "parameter layers.2.weight with strides");
  }

  {
    const ProcessGroup elastic = ddpkit::init_process_group({.backend = group.backend_name(), .elastic = true});
    const char* const message = "does not support a group with InitOptions::elastic";
    CHECK_THROWS_WITH(FullyShardedDataParallel(mlp(), elastic), ContainsSubstring(message));
    CHECK_THROWS_WITH(ddpkit::fully_shard(*mlp()->layers[0], elastic), ContainsSubstring(message));
  }

  model = mlp();
  FullyShardedDataParallel fsdp(model, group);
  refuses(model, {}, "parameter layers.0.weight is sharded already");
  if (group.world_size() > 1) {
    CHECK_THROWS_WITH(ddpkit::join(fsdp, [] {}), ContainsSubstring("join() does not support FullyShardedDataParallel"));
    CHECK(ddpkit::JoinContext::of(fsdp) == nullptr);
    CHECK(ddpkit::JoinContext::running(group) == nullptr);
    CHECK_THROWS_AS(ddpkit::DistributedDataParallel(model, group), InvalidArgument);
  }
  CHECK_THROWS_WITH(fsdp.register_comm_hook(ddpkit::comm_hooks::fp16_compress(group)),
                    ContainsSubstring("gradients are sharded"));
  const torch::optim::AdamWOptions options(0.1);
  CHECK_THROWS_WITH(ShardedOptimizer<FusedAdamW>(fsdp, options, {.update_in_backward = true}),
                    ContainsSubstring("update_in_backward does not support the sharded weights"));
  if (group.backend_name() == "shm" && group.world_size() > 1)
    CHECK_THROWS_WITH(ShardedOptimizer<FusedAdamW>(fsdp, options, {.shared_weights = true}),
                      ContainsSubstring("shared_weights does not support the sharded weights"));
}
