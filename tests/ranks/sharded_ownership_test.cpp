// Who owns gradients, hooks and weights when objects are replaced, moved and destroyed in any order.
#include <torch/torch.h>

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/optim/learning_rate.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "optim/shards.h"
#include "ranks/comparisons.h"
#include "ranks/two_layers.h"
#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"

using ddpkit::DistributedDataParallel;
using ddpkit::InvalidArgument;
using ddpkit::ProcessGroup;
using ddpkit::optim::FusedAdamW;
using ddpkit::optim::FusedSGD;
using ddpkit::optim::ShardedOptimizer;
using ddpkit::optim::ShardedOptions;
using ddpkit::testing::check_same_bits_on_all_ranks;
namespace two_layers = ddpkit::testing::two_layers;

namespace {

const torch::optim::SGDOptions kSgd(0.1);

/// Runs a step of plain SGD in one process on the inputs of all ranks.
void step_alone(torch::nn::Sequential& model, int step, int ranks) {
  model->zero_grad();
  for (int r = 0; r < ranks; ++r) (two_layers::loss_of(model->forward(two_layers::input(step, r))) / ranks).backward();
  const torch::NoGradGuard no_grad;
  for (torch::Tensor& parameter : model->parameters()) parameter.sub_(parameter.grad(), kSgd.lr());
}

template <class Ddp, class Optimizer>
void step_with(Ddp& ddp, Optimizer& optimizer, int step) {
  optimizer.zero_grad();
  two_layers::loss_of(ddp(two_layers::input(step, ddp.group().rank()))).backward();
  optimizer.step();
}

void check_equal(const torch::nn::Sequential& model, const torch::nn::Sequential& reference) {
  for (std::size_t i = 0; i < model->parameters().size(); ++i)
    CHECK(at::allclose(model->parameters()[i], reference->parameters()[i], 0, 1e-10));
}

std::vector<ShardedOptions> ways() {
  return {
      {}, {.update_in_backward = true}, {.shared_weights = true}, {.shared_weights = true, .update_in_backward = true}};
}

using Sharded = ShardedOptimizer<FusedSGD>;
using Ddp = DistributedDataParallel<torch::nn::SequentialImpl>;

}  // namespace

RANK_TEST("a second sharded optimizer takes the place of the first", "[optim][sharded]", 2, 3) {
  for (const ShardedOptions& options : ways()) {
    auto model = two_layers::make_model();
    auto reference = two_layers::make_model();
    DistributedDataParallel ddp(model, group);
    int step = 0;
    const auto train = [&](auto& optimizer) {
      for (const int end = step + 2; step < end; ++step) {
        step_with(ddp, optimizer, step);
        step_alone(reference, step, group.world_size());
        check_equal(model, reference);
      }
    };
    auto owned = std::make_unique<Sharded>(ddp, kSgd, options);
    train(*owned);
    owned = std::make_unique<Sharded>(ddp, kSgd, options);
    train(*owned);
    Sharded value(ddp, kSgd, options);
    CHECK_THROWS_WITH(owned->step(), ContainsSubstring("another ShardedOptimizer has been made"));
    CHECK_THROWS_AS(owned->clip_grad_norm(1), InvalidArgument);
    train(value);
    owned.reset();
    train(value);
    ddpkit::optim::LearningRateScheduler scheduler(value, ddpkit::optim::Schedule());
    value = Sharded(ddp, kSgd, options);
    scheduler.step();
    train(value);
    Sharded moved(std::move(value));
    train(moved);
    check_same_bits_on_all_ranks(group, *model);
  }
}

RANK_TEST("a wrapper and its sharded optimizer end in any order", "[optim][sharded]", 2) {
  for (const ShardedOptions& options : ways()) {
    auto model = two_layers::make_model();
    auto reference = two_layers::make_model();
    auto ddp = std::make_unique<Ddp>(model.ptr(), group);
    auto optimizer = std::make_unique<Sharded>(*ddp, kSgd, options);
    step_with(*ddp, *optimizer, 0);
    ddp.reset();
    CHECK_THROWS_WITH(optimizer->step(), ContainsSubstring("has been destroyed"));
    ddp = std::make_unique<Ddp>(model.ptr(), group);
    optimizer = std::make_unique<Sharded>(*ddp, kSgd, options);
    step_with(*ddp, *optimizer, 1);
    // Replaces a DDP object that still exists.
    ddp = std::make_unique<Ddp>(model.ptr(), group);
    CHECK_THROWS_WITH(optimizer->step(), ContainsSubstring("wrapped again"));
    optimizer = std::make_unique<Sharded>(*ddp, kSgd, options);
    step_with(*ddp, *optimizer, 2);
    // Destroys DDP between forward and backward: the model's parameters get whole gradients again.
    auto loss = two_layers::loss_of((*ddp)(two_layers::input(3, group.rank())));
    optimizer.reset();
    loss.backward();
    torch::optim::SGD(model->parameters(), kSgd).step();
    for (int step = 0; step < 4; ++step) step_alone(reference, step, group.world_size());
    check_equal(model, reference);
  }
}

RANK_TEST("a sharded optimizer is replaced after a backward that threw", "[optim][sharded]", 2) {
  for (const ShardedOptions& options : ways()) {
    auto model = two_layers::make_model();
    auto reference = two_layers::make_model();
    DistributedDataParallel ddp(model, group);
    auto optimizer = std::make_unique<Sharded>(ddp, kSgd, options);
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {
        torch::Tensor in = two_layers::input(step, group.rank()).requires_grad_();
        in.register_hook([](const torch::Tensor&) -> void { throw std::runtime_error("in backward"); });
        torch::Tensor out = ddp(in);
        // Throws after the last layer's gradient and before the first layer's.
        CHECK_THROWS_WITH((out.sum() + (in * 2).sum()).backward(), ContainsSubstring("in backward"));
        optimizer = std::make_unique<Sharded>(ddp, kSgd, options);
        if (options.update_in_backward) return;  // Some weights have been updated.
      }
      step_with(ddp, *optimizer, step);
      step_alone(reference, step, group.world_size());
      check_equal(model, reference);
    }
  }
}

RANK_TEST("a parameter has one DistributedDataParallel, the newest", "[ddp]", 2, 3) {
  auto model = two_layers::make_model();
  auto reference = two_layers::make_model();
  DistributedDataParallel old(model, group);
  DistributedDataParallel ddp(model, group);
  CHECK_THROWS_WITH(old(two_layers::input(0, 0)), ContainsSubstring("a newer DistributedDataParallel"));
  torch::optim::SGD optimizer(model->parameters(), kSgd);
  for (int step = 0; step < 3; ++step) {
    step_with(ddp, optimizer, step);
    step_alone(reference, step, group.world_size());
  }
  check_equal(model, reference);
}

RANK_TEST("groups of a sharded optimizer are fixed", "[optim][sharded]", 2) {
  for (const ShardedOptions& options : ways()) {
    auto model = two_layers::make_model();
    const auto own =
        ddpkit::testing::another_group(group, fmt::format("{} {}", options.shared_weights, options.update_in_backward));
    DistributedDataParallel ddp(model, own);
    Sharded optimizer(ddp, kSgd, options);
    step_with(ddp, optimizer, 0);
    torch::optim::Optimizer& base = optimizer;
    base.add_param_group(torch::optim::OptimizerParamGroup({torch::ones({3}).requires_grad_()}));
    CHECK_THROWS_WITH(optimizer.consolidate_state(), ContainsSubstring("parameter groups have changed"));
    CHECK_THROWS_WITH(ddpkit::optim::Shards::of(optimizer).make_whole(),
                      ContainsSubstring("parameter groups have changed"));
    CHECK_THROWS_WITH(step_with(ddp, optimizer, 1), ContainsSubstring("parameter groups have changed"));
  }
}

RANK_TEST("an error of one rank's sharded optimizer is an error on all ranks", "[optim][sharded]", 2, 3) {
  auto model = two_layers::make_model();
  DistributedDataParallel ddp(model, group);
  Sharded optimizer(ddp, kSgd);
  step_with(ddp, optimizer, 0);
  CHECK_THROWS_WITH(optimizer.consolidate_state(group.rank() == 1 ? 99 : 0), ContainsSubstring("to rank 99"));
  torch::optim::Optimizer& base = optimizer;
  if (group.rank() == 1) base.add_param_group(torch::optim::OptimizerParamGroup({torch::ones({3}).requires_grad_()}));
  CHECK_THROWS_WITH(optimizer.consolidate_state(), ContainsSubstring("parameter groups have changed"));
}

RANK_TEST("views of one flat tensor stay views under a sharded optimizer", "[optim][sharded]", 2, 3) {
  for (const ShardedOptions& options : ways()) {
    auto model = two_layers::make_model();
    auto reference = two_layers::make_model();
    std::vector<torch::Tensor> parts;
    for (const auto& parameter : model->parameters()) parts.push_back(parameter.detach().flatten());
    const torch::Tensor flat = torch::cat(parts);
    std::int64_t offset = 0;
    for (auto& parameter : model->parameters()) {
      parameter.set_data(flat.narrow(0, offset, parameter.numel()).view(parameter.sizes()));
      offset += parameter.numel();
    }
    DistributedDataParallel ddp(model, group);
    Sharded optimizer(ddp, kSgd, options);
    for (int step = 0; step < 4; ++step) {
      step_with(ddp, optimizer, step);
      step_alone(reference, step, group.world_size());
      check_equal(model, reference);
      CHECK(at::allclose(flat, ddpkit::testing::flat(model->parameters()), 0, 0));
      group.barrier();
      const torch::NoGradGuard no_grad;
      flat.mul_(0.5);
      for (auto& parameter : reference->parameters()) parameter.mul_(0.5);
      check_equal(model, reference);
      group.barrier();
    }
    check_same_bits_on_all_ranks(group, *model);
  }
}

RANK_TEST("a sharded optimizer refuses memory that it does not understand", "[optim][sharded]", 2) {
  const auto make = [&](const ShardedOptions& options, const auto& change) {
    auto model = two_layers::make_model();
    change(model);
    DistributedDataParallel ddp(model, group);
    Sharded optimizer(ddp, kSgd, options);
    step_with(ddp, optimizer, 0);
    check_same_bits_on_all_ranks(group, *model);
  };
  const auto part_of_more = [](torch::nn::Sequential& model) {
    model->parameters()[1].set_data(
        torch::zeros({2 * two_layers::kWidth}, torch::kDouble).narrow(0, 0, two_layers::kWidth));
  };
  make({}, part_of_more);
  CHECK_THROWS_WITH(make({.shared_weights = true}, part_of_more), ContainsSubstring("belong to no parameter"));
  const auto overlap = [](torch::nn::Sequential& model) {
    const auto all = torch::zeros({2 * two_layers::kWidth}, torch::kDouble);
    model->parameters()[1].set_data(all.narrow(0, 0, two_layers::kWidth));
    model->parameters()[3].set_data(all.narrow(0, two_layers::kWidth - 2, 3));
  };
  CHECK_THROWS_WITH(make({}, overlap), ContainsSubstring("0.bias and 2.bias overlap in memory"));
  CHECK_THROWS_WITH(make({.shared_weights = group.rank() == 1}, [](auto&) {}),
                    ContainsSubstring("differs between rank 0 and rank 1") && ContainsSubstring("shared_weights true"));
  const auto on_one_rank = [&](torch::nn::Sequential& model) {
    if (group.rank() == 1) part_of_more(model);
  };
  CHECK_THROWS_WITH(make({.shared_weights = true}, on_one_rank), ContainsSubstring("belong to no parameter"));
}

RANK_TEST("a sharded optimizer follows a change of strides, or names it", "[optim][sharded]", 2) {
  for (const ShardedOptions& options : ways()) {
    auto model = two_layers::make_model();
    auto reference = two_layers::make_model();
    const auto own =
        ddpkit::testing::another_group(group, fmt::format("{} {}", options.shared_weights, options.update_in_backward));
    DistributedDataParallel ddp(model, own);
    ShardedOptimizer<FusedSGD> optimizer(ddp, torch::optim::SGDOptions(0.1).momentum(0.9), options);
    torch::optim::SGD alone(reference->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::Tensor weight = model->parameters()[0];
    const auto transpose = [&] { weight.set_data(weight.detach().t().contiguous().t()); };
    const auto train = [&](int step) {
      optimizer.zero_grad();
      const auto loss = two_layers::loss_of(ddp(two_layers::input(step, group.rank())));
      if (step == 3) transpose();  // Gradients arrive in the new layout.
      loss.backward();
      optimizer.step();
      alone.zero_grad();
      for (int r = 0; r < group.world_size(); ++r)
        (two_layers::loss_of(reference->forward(two_layers::input(step, r))) / group.world_size()).backward();
      alone.step();
      check_equal(model, reference);
    };
    for (int step = 0; step < 5; ++step) {
      train(step);
      if (step == 1) transpose();
    }
    const torch::Tensor held = weight.detach().t().contiguous().t();
    weight.set_data(held);
    CHECK_THROWS_WITH(train(5), ContainsSubstring("0.weight is not dense in memory any more, or shares it"));
  }
}

RANK_TEST("backward after a sharded step finds that weights have changed", "[optim][sharded]", 2) {
  for (const ShardedOptions& options : ways()) {
    auto model = two_layers::make_model();
    DistributedDataParallel ddp(model, group);
    Sharded optimizer(ddp, kSgd, options);
    const auto before = two_layers::loss_of(ddp(two_layers::input(0, group.rank())));
    step_with(ddp, optimizer, 1);
    CHECK_THROWS_WITH(before.backward(), ContainsSubstring("modified by an inplace operation"));
    step_with(ddp, optimizer, 2);
    check_same_bits_on_all_ranks(group, *model);
  }
}

RANK_TEST("system calls read into the weights of a sharded optimizer", "[optim][sharded]", 2) {
  struct sigaction before {
  }, after{};
  REQUIRE(::sigaction(SIGSEGV, nullptr, &before) == 0);
  auto model = two_layers::make_model();
  DistributedDataParallel ddp(model, group);
  Sharded optimizer(ddp, kSgd);
  CHECK_FALSE(optimizer.has_shared_weights());
  REQUIRE(::sigaction(SIGSEGV, nullptr, &after) == 0);
  CHECK(before.sa_handler == after.sa_handler);

  const ddpkit::testing::Folder folder;
  const std::string path = (folder.path() / "weights").string();
  const torch::Tensor weight = model->parameters()[0];
  const torch::Tensor values = torch::full_like(weight, 0.25);
  const auto bytes = static_cast<std::streamsize>(values.nbytes());
  std::ofstream(path, std::ios::binary).write(static_cast<const char*>(values.const_data_ptr()), bytes);
  for (int step = 0; step < 3; ++step) {
    step_with(ddp, optimizer, step);
    CHECK_FALSE(torch::equal(weight, values));
    if (step == 0) {
      const int file = ::open(path.c_str(), O_RDONLY);
      CHECK(::read(file, weight.data_ptr(), values.nbytes()) == bytes);
      ::close(file);
    } else if (step == 1) {
      CHECK(std::ifstream(path, std::ios::binary).read(static_cast<char*>(weight.data_ptr()), bytes));
    } else {
      std::FILE* file = std::fopen(path.c_str(), "rb");
      CHECK(std::fread(weight.data_ptr(), 1, values.nbytes(), file) == values.nbytes());
      std::fclose(file);
    }
    CHECK(torch::equal(weight, values));
  }
}
