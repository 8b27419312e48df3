// Compares training with DistributedDataParallel with one process on the joined batch.
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ddpkit/parallel/distributed_data_parallel.h>

#include "ranks/comparisons.h"
#include "ranks/many_kinds.h"
#include "support/catch.h"
#include "support/ranks.h"

using namespace ddpkit::testing;
using ddpkit::DistributedDataParallel;
using ddpkit::ProcessGroup;

RANK_TEST("20 steps give the weights of one process on the joined batch", "[ddp]", 1, 2, 3, 4) {
  for (const std::string name : {"sgd", "adam", "adamw"}) {
    for (const double bucket_mb : {0.0005, 25.0}) {
      auto reference = many_kinds(0);
      train_alone(*reference, name, 20);

      // The weights differ between ranks: the constructor must broadcast rank 0's.
      auto model = many_kinds(static_cast<std::uint64_t>(group.rank()));
      const torch::Tensor before = flat_parameters(*many_kinds(0));
      DistributedDataParallel ddp(model, group, {.bucket_cap_mb = bucket_mb, .first_bucket_cap_mb = bucket_mb});
      CHECK(torch::equal(flat_parameters(*model), before));
      std::size_t in_buckets = 0;
      for (const auto& bucket : ddp.reducer().buckets()) in_buckets += bucket.size();
      CHECK(in_buckets == unique_parameters(*model).size());  // A tied parameter counts once.
      auto optimizer = make_optimizer(name, unique_parameters(*model));
      for (int step = 0; step < 20; ++step) {
        const Batch batch = joined_batch(step).part(group.rank(), group.world_size());
        // Alternates both ways.
        optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
        loss_of(ddp(batch.data), batch).backward();
        optimizer->step();
      }
      INFO(name << ", buckets of " << bucket_mb << " MiB");
      CHECK(largest_difference(flat_parameters(*model), before) > 1e-3);
      CHECK(largest_difference(flat_parameters(*model), flat_parameters(*reference)) < 1e-10);
      check_same_bits_on_all_ranks(group, flat_parameters(*model));
    }
  }
}

RANK_TEST("the same bits in every run", "[ddp]", 2, 3) {
  const auto run = [&] {
    auto model = many_kinds(5);
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0.001, .first_bucket_cap_mb = 0.001});
    train_on_ranks(ddp, group, "adam", 10);
    return flat_parameters(*model);
  };
  const torch::Tensor first = run();
  CHECK(torch::equal(run(), first));
}

RANK_TEST("gradient clipping sees the averaged gradient", "[ddp]", 2, 3) {
  auto reference = many_kinds(0);
  const Batch joined = joined_batch(0);
  loss_of(reference->forward(joined.data), joined).backward();
  const double expected = torch::nn::utils::clip_grad_norm_(unique_parameters(*reference), 0.01);

  auto model = many_kinds(0);
  DistributedDataParallel ddp(model, group);
  const Batch batch = joined.part(group.rank(), group.world_size());
  loss_of(ddp(batch.data), batch).backward();
  CHECK(torch::nn::utils::clip_grad_norm_(unique_parameters(*model), 0.01) == Approx(expected).epsilon(1e-10));
  CHECK(largest_difference(flat_gradients(*model), flat_gradients(*reference)) < 1e-12);
}

RANK_TEST("no_sync accumulates, and the next backward averages the sum", "[ddp]", 2, 3) {
  auto reference = many_kinds(0);
  for (int step = 0; step < 3; ++step) {
    const Batch joined = joined_batch(step);
    loss_of(reference->forward(joined.data), joined).backward();
  }

  auto model = many_kinds(0);
  DistributedDataParallel ddp(model, group);
  const auto backward = [&](int step) {
    const Batch batch = joined_batch(step).part(group.rank(), group.world_size());
    loss_of(ddp(batch.data), batch).backward();
  };
  {
    const auto guard = ddp.no_sync();
    backward(0);
    const torch::Tensor local = flat_gradients(*model);
    const auto all = group.all_gather(local);
    CHECK_FALSE(torch::equal(all[0], all[1]));
    backward(1);
  }
  backward(2);
  CHECK(largest_difference(flat_gradients(*model), flat_gradients(*reference)) < 1e-12);
  check_same_bits_on_all_ranks(group, flat_gradients(*model));
}

RANK_TEST("the end of a nested no_sync leaves the outer one in force", "[ddp]", 2, 3) {
  auto model = many_kinds(0), alone = many_kinds(0);
  DistributedDataParallel ddp(model, group);
  const auto backward = [&](int step) {
    const Batch batch = joined_batch(step).part(group.rank(), group.world_size());
    loss_of(ddp(batch.data), batch).backward();
    loss_of(alone->forward(batch.data), batch).backward();
  };
  {
    const auto outer = ddp.no_sync();
    {
      const auto inner = ddp.no_sync();
      backward(0);
    }
    backward(1);
    CHECK(largest_difference(flat_gradients(*model), flat_gradients(*alone)) < 1e-12);
  }
  backward(2);
  const torch::Tensor mean = group.all_gather(flat_gradients(*alone)).mean(0);
  CHECK(largest_difference(flat_gradients(*model), mean) < 1e-12);
}

RANK_TEST("a backward that throws half-way leaves the next one sound", "[ddp]", 2) {
  struct Failing : torch::autograd::Function<Failing> {
    static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) { return x.clone(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
      throw std::runtime_error("half-way");
    }
  };
  torch::manual_seed(0);
  torch::nn::Linear first(3, 3), second(3, 3);
  torch::nn::Sequential model(first, second);
  model->to(torch::kDouble);
  const auto reference = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 100, .first_bucket_cap_mb = 100});
  const auto loss_on = [&](int rank, auto& forward) {
    torch::manual_seed(static_cast<std::uint64_t>(rank));
    return forward(torch::randn({2, 3}, torch::kDouble)).square().sum();
  };
  const auto failing = [&](const torch::Tensor& x) { return second(Failing::apply(first(x))); };
  CHECK_THROWS_WITH(loss_on(group.rank(), failing).backward(), ContainsSubstring("half-way"));
  model->zero_grad();
  loss_on(group.rank(), ddp).backward();
  const auto alone = [&](const torch::Tensor& x) { return reference->forward(x); };
  for (int r = 0; r < group.world_size(); ++r) (loss_on(r, alone) / group.world_size()).backward();
  CHECK(largest_difference(flat_gradients(*model), flat_gradients(*reference)) < 1e-12);
  check_same_bits_on_all_ranks(group, flat_gradients(*model));
}
