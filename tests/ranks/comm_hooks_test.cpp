#include <torch/torch.h>

#include <ddpkit/error.h>
#include <ddpkit/parallel/comm_hooks.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/parallel/power_sgd.h>

#include "ranks/comparisons.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::BucketReduction;
using ddpkit::CommHook;
using ddpkit::DistributedDataParallel;
using ddpkit::DistributedDataParallelOptions;
using ddpkit::GradBucket;
using ddpkit::ProcessGroup;
using ddpkit::testing::check_same_bits_on_all_ranks;
namespace comm_hooks = ddpkit::comm_hooks;

namespace {

/// Two heads, of which a forward uses one. Small caps give several buckets.
struct HeadsImpl : torch::nn::Module {
  HeadsImpl() {
    torch::manual_seed(3);
    trunk = register_module("trunk", torch::nn::Linear(7, 20));
    middle = register_module("middle", torch::nn::Linear(20, 20));
    heads = register_module("heads", torch::nn::ModuleList(torch::nn::Linear(20, 5), torch::nn::Linear(20, 5)));
  }
  torch::Tensor forward(const torch::Tensor& x, std::size_t head) {
    return heads->at<torch::nn::LinearImpl>(head).forward(torch::tanh(middle->forward(torch::tanh(trunk->forward(x)))));
  }
  torch::nn::Linear trunk{nullptr}, middle{nullptr};
  torch::nn::ModuleList heads{nullptr};
};

torch::Tensor flat_gradients(const torch::nn::Module& module) {
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : module.parameters())
    gradients.push_back(parameter.grad().defined() ? parameter.grad().reshape({-1}) : torch::zeros({1}));
  return torch::cat(gradients);
}

struct Setting {
  DistributedDataParallelOptions options = {.bucket_cap_mb = 0.001, .first_bucket_cap_mb = 0.001};
  CommHook hook = nullptr;
  bool accumulate = false;   ///< Accumulates under no_sync first.
  bool other_heads = false;  ///< Rank r uses head r % 2.
};

/// Returns the gradients after each step. [step][element]
torch::Tensor gradients_of(const ProcessGroup& group, const Setting& setting) {
  const auto model = std::make_shared<HeadsImpl>();
  if (!setting.other_heads) model->heads->ptr<torch::nn::LinearImpl>(1)->weight.requires_grad_(false);
  if (!setting.other_heads) model->heads->ptr<torch::nn::LinearImpl>(1)->bias.requires_grad_(false);
  DistributedDataParallel ddp(model, group, setting.options);
  if (setting.hook) ddp.register_comm_hook(setting.hook);
  torch::optim::SGD optimizer(model->parameters(), 0.002);
  std::vector<torch::Tensor> steps;
  for (int step = 0; step < 4; ++step) {
    torch::manual_seed(static_cast<std::uint64_t>(100 * step + group.rank()));
    optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
    const std::size_t head = setting.other_heads ? static_cast<std::size_t>(group.rank() % 2) : 0;
    const auto backward = [&] { ddp(torch::randn({6, 7}), head).pow(2).sum().backward(); };
    if (setting.accumulate) {
      const auto guard = ddp.no_sync();
      backward();
    }
    backward();
    steps.push_back(flat_gradients(*model));
    optimizer.step();
  }
  return torch::stack(steps);
}

/// Runs `action` with every combination of options that hooks must support.
template <class Action>
void for_each_setting(const Action& action) {
  for (const bool view : {false, true}) {
    for (const bool accumulate : {false, true}) {
      for (const bool other_heads : {false, true}) {
        INFO("gradient_as_bucket_view " << view << ", no_sync " << accumulate << ", unused parameters " << other_heads);
        Setting setting;
        setting.options.gradient_as_bucket_view = view;
        setting.options.find_unused_parameters = other_heads;
        setting.accumulate = accumulate;
        setting.other_heads = other_heads;
        action(setting);
      }
    }
  }
}

/// Returns the gradients of a Linear(40, 30) after `hook`, and each rank's gradients before `hook`. [rank]
std::pair<torch::Tensor, torch::Tensor> reduced_and_own(const ProcessGroup& group, const CommHook& hook,
                                                        torch::ScalarType dtype = torch::kFloat) {
  torch::nn::Linear model(40, 30);
  model->to(dtype);
  DistributedDataParallel ddp(model, group);
  ddp.register_comm_hook(hook);
  torch::manual_seed(static_cast<std::uint64_t>(group.rank()));
  const torch::Tensor x = torch::randn({9, 40}, dtype) * 3;
  {
    const auto guard = ddp.no_sync();
    ddp(x).pow(2).sum().backward();
  }
  const torch::Tensor own = flat_gradients(*model);
  model->zero_grad();
  ddp(x).pow(2).sum().backward();
  return {flat_gradients(*model), group.all_gather(own)};
}

double relative_distance(const torch::Tensor& a, const torch::Tensor& b) {
  return ((a - b).norm() / b.norm()).item<double>();
}

/// Computes what Python's hook does: round, divide in the half type, sum in float32, round, cast back.
torch::Tensor half_mean(const torch::Tensor& own, torch::ScalarType half) {
  return own.to(half).div(own.size(0)).to(torch::kFloat).sum(0).to(half).to(own.scalar_type());
}

}  // namespace

RANK_TEST("the hook all_reduce gives the very bits of no hook", "[comm_hooks]", 2, 3) {
  for_each_setting([&](Setting setting) {
    const torch::Tensor without = gradients_of(group, setting);
    setting.hook = comm_hooks::all_reduce(group);
    CHECK(torch::equal(gradients_of(group, setting), without));
  });
}

RANK_TEST("fp16 and bf16 give what their rounding leaves of the mean", "[comm_hooks]", 2, 3) {
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    const auto [fp16, fp16_own] = reduced_and_own(group, comm_hooks::fp16_compress(group), dtype);
    CHECK(torch::equal(fp16, half_mean(fp16_own, torch::kHalf)));
    CHECK_FALSE(torch::equal(fp16, fp16_own.mean(0)));
    CHECK(relative_distance(fp16, fp16_own.mean(0)) < 2e-3);
    const auto [bf16, bf16_own] = reduced_and_own(group, comm_hooks::bf16_compress(group), dtype);
    CHECK(torch::equal(bf16, half_mean(bf16_own, torch::kBFloat16)));
    CHECK_FALSE(torch::equal(bf16, fp16));
    CHECK(relative_distance(bf16, bf16_own.mean(0)) < 2e-2);
  }
}

RANK_TEST("half hooks go along with views, no_sync and unused parameters", "[comm_hooks]", 2, 3) {
  for_each_setting([&](Setting setting) {
    const torch::Tensor without = gradients_of(group, setting);
    for (const CommHook& hook : {comm_hooks::fp16_compress(group), comm_hooks::bf16_compress(group)}) {
      setting.hook = hook;
      const torch::Tensor with = gradients_of(group, setting);
      CHECK(torch::allclose(with, without, 5e-2, 5e-2));
      check_same_bits_on_all_ranks(group, with);
    }
  });
}

RANK_TEST("a wrapped hook sees halves, and its result is cast back", "[comm_hooks]", 2, 3) {
  for (const bool fp16 : {true, false}) {
    const auto half = fp16 ? torch::kHalf : torch::kBFloat16;
    int calls = 0;
    const CommHook inner = [&](GradBucket& bucket) -> BucketReduction {
      ++calls;
      CHECK(bucket.buffer.scalar_type() == half);
      CHECK(bucket.gradients[1].sizes() == bucket.parameters[1].sizes());
      CHECK(bucket.gradients[1].storage().is_alias_of(bucket.buffer.storage()));
      return comm_hooks::all_reduce(group)(bucket);
    };
    const auto [reduced, own] = reduced_and_own(
        group, fp16 ? comm_hooks::fp16_compress_wrapper(inner) : comm_hooks::bf16_compress_wrapper(inner));
    CHECK(calls == 1);
    // Summed and divided in float32.
    CHECK(torch::equal(reduced,
                       own.to(half).to(torch::kFloat).sum(0).div(group.world_size()).to(half).to(torch::kFloat)));
  }
  CHECK_THROWS_AS(comm_hooks::fp16_compress_wrapper(nullptr), ddpkit::InvalidArgument);
}

RANK_TEST("complex and half gradients through the half hooks", "[comm_hooks]", 2, 3) {
  struct Mixed : torch::nn::Module {
    Mixed() {
      a = register_parameter("a", torch::ones({3}, torch::kComplexDouble));
      b = register_parameter("b", torch::ones({2, 3}, torch::kHalf));
    }
    /// Each element has another factor.
    static torch::Tensor of_a() { return torch::tensor({1.0, -2.0, 4.0}, torch::kDouble); }
    static torch::Tensor of_b() { return torch::tensor({{1.0, 2.0, 3.0}, {-4.0, 5.0, 6.0}}, torch::kDouble); }
    torch::Tensor forward(double x) {
      const torch::Tensor scaled = a * (of_a() * x);
      return torch::real(scaled).sum() + torch::imag(scaled).sum() * 2 + (b * (of_b() * x)).sum();
    }
    torch::Tensor a, b;
  };
  for (const CommHook& hook : {comm_hooks::fp16_compress(group), comm_hooks::bf16_compress(group),
                               comm_hooks::fp16_compress_wrapper(comm_hooks::all_reduce(group)),
                               comm_hooks::bf16_compress_wrapper(comm_hooks::fp16_compress(group))}) {
    const auto model = std::make_shared<Mixed>();
    DistributedDataParallel ddp(model, group);
    ddp.register_comm_hook(hook);
    ddp(1.0 + group.rank()).backward();
    const double mean = (group.world_size() + 1) / 2.0;
    CHECK(torch::allclose(torch::real(model->a.grad()), mean * Mixed::of_a(), 1e-2, 0));
    CHECK(torch::allclose(torch::imag(model->a.grad()), 2 * mean * Mixed::of_a(), 1e-2, 0));
    CHECK(torch::allclose(model->b.grad().to(torch::kDouble), mean * Mixed::of_b(), 1e-2, 0));
  }
}

RANK_TEST("a hook of the user's own: shown every bucket in order, and may finish late", "[comm_hooks]", 2, 3) {
  for_each_setting([&](Setting setting) {
    const torch::Tensor without = gradients_of(group, setting);
    std::vector<std::size_t> order;
    std::size_t last = 0;
    setting.hook = [&](GradBucket& bucket) -> BucketReduction {
      order.push_back(bucket.index);
      if (bucket.is_last) last = bucket.index;
      CHECK(bucket.gradients.size() == bucket.names.size());
      CHECK(bucket.gradients.size() == bucket.parameters.size());
      for (std::size_t i = 0; i < bucket.gradients.size(); ++i)
        CHECK(bucket.gradients[i].sizes() == bucket.parameters[i].sizes());
      // Doubles in another data type when backward ends.
      return {.finish = [&group, doubled = bucket.buffer.to(torch::kDouble).mul(2)] {
        group.all_reduce(doubled, ddpkit::ReduceOp::kAvg);
        return doubled;
      }};
    };
    const torch::Tensor with = gradients_of(group, setting);
    REQUIRE(order.size() > 4);
    CHECK(last > 0);
    for (std::size_t i = 0; i < order.size(); ++i)
      CHECK(order[i] == (i == 0 || order[i - 1] == last ? 0 : order[i - 1] + 1));
    // Compares only the first step: later gradients come from other weights.
    CHECK(torch::allclose(with[0], 2 * without[0], 1e-5, 1e-6));
    check_same_bits_on_all_ranks(group, with);
  });
}

RANK_TEST("the hook can be taken away again", "[comm_hooks]", 2) {
  torch::nn::Linear model(3, 2);
  DistributedDataParallel ddp(model, group);
  int calls = 0;
  ddp.register_comm_hook([&](GradBucket& bucket) -> BucketReduction {
    ++calls;
    return comm_hooks::all_reduce(group)(bucket);
  });
  const torch::Tensor x = torch::full({1, 3}, group.rank() + 1.0);
  ddp(x).sum().backward();
  CHECK(calls == 1);
  ddp.register_comm_hook(nullptr);
  model->zero_grad();
  ddp(x).sum().backward();
  CHECK(calls == 1);
  CHECK(torch::equal(model->weight.grad(), torch::full({2, 3}, 1.5)));
}

RANK_TEST("a hook that throws is an error that names the bucket, here and on the others", "[comm_hooks]", 2, 3) {
  // Once in the hook, once in its `finish` function.
  for (const int where : {0, 1}) {
    const ProcessGroup own = ddpkit::testing::another_group(group, "throws-" + std::to_string(where));
    const auto model = std::make_shared<HeadsImpl>();
    DistributedDataParallel ddp(model, own,
                                {.bucket_cap_mb = 0.001, .first_bucket_cap_mb = 0.001, .find_unused_parameters = true});
    ddp.register_comm_hook([&, where](GradBucket& bucket) -> BucketReduction {
      const bool fails = bucket.index == 1 && own.rank() == 1;
      if (fails && where == 0) throw std::runtime_error("out of luck");
      BucketReduction pending = comm_hooks::all_reduce(own)(bucket);
      pending.finish = [fails, &own]() -> torch::Tensor {
        if (fails) throw std::runtime_error("out of luck");
        own.barrier();
        return {};
      };
      return pending;
    });
    try {
      ddp(torch::ones({2, 7}), 0).sum().backward();
      FAIL("threw nothing");
    } catch (const ddpkit::Error& error) {
      CHECK_THAT(error.what(), ContainsSubstring("bucket 1"));
      CHECK_THAT(error.what(), ContainsSubstring("rank 1"));
      CHECK_THAT(error.what(), ContainsSubstring("out of luck"));
      CHECK_THAT(error.what(), ContainsSubstring(".weight"));
      if (own.rank() == 1) CHECK(error.context().bucket == 1);
      if (own.rank() != 1) CHECK(dynamic_cast<const ddpkit::PeerLost*>(&error) != nullptr);
    }
    group.barrier();
  }
}

RANK_TEST("a hook that returns a tensor of another shape is refused", "[comm_hooks]", 2) {
  const ProcessGroup own = ddpkit::testing::another_group(group, "shape");
  torch::nn::Linear model(3, 2);
  DistributedDataParallel ddp(model, own);
  ddp.register_comm_hook([](GradBucket&) -> BucketReduction { return {.finish = [] { return torch::zeros({1}); }}; });
  try {
    ddp(torch::ones({1, 3})).sum().backward();
    FAIL("threw nothing");
  } catch (const ddpkit::Error& error) {
    CHECK_THAT(error.what(), ContainsSubstring("returned a tensor of [1]"));
    CHECK_THAT(error.what(), ContainsSubstring("bucket 0"));
  }
  group.barrier();
}

RANK_TEST("a hook may call what only reads, and is refused what would disturb backward", "[comm_hooks]", 1, 2) {
  const auto model = std::make_shared<HeadsImpl>();
  DistributedDataParallel ddp(model, group,
                              {.bucket_cap_mb = 0.001, .first_bucket_cap_mb = 0.001, .find_unused_parameters = true});
  const auto read = [&](std::uint64_t steps) {
    CHECK(ddp.stats().steps == steps);
    CHECK(ddp.reducer().buckets().size() > 1);
    (void)ddp.reducer().arena();
  };
  std::uint64_t step = 0;
  ddp.register_comm_hook([&](GradBucket& bucket) -> BucketReduction {
    read(step);
    CHECK_THROWS_WITH(ddp.register_comm_hook({}), ContainsSubstring("while backward runs"));
    CHECK_THROWS_WITH(ddp(torch::ones({2, 7}), 0), ContainsSubstring("cannot call forward"));
    BucketReduction pending = comm_hooks::all_reduce(group)(bucket);
    pending.finish = [&, inner = std::move(pending.finish)]() -> torch::Tensor {
      read(step);
      return inner ? inner() : torch::Tensor();
    };
    return pending;
  });
  for (; step < 2; ++step) ddp(torch::full({2, 7}, group.rank() + 1.0), 0).sum().backward();
  CHECK(ddp.stats().steps == 2);
}

RANK_TEST("a hook that runs a backward of the model is an error on all ranks", "[comm_hooks]", 1, 2) {
  const ProcessGroup own = ddpkit::testing::another_group(group, "backward in a hook");
  torch::nn::Linear model(3, 2);
  DistributedDataParallel ddp(model, own);
  ddp.register_comm_hook([&](GradBucket& bucket) -> BucketReduction {
    const torch::AutoGradMode on(true);
    model->forward(torch::ones({1, 3})).sum().backward();
    return comm_hooks::all_reduce(own)(bucket);
  });
  CHECK_THROWS_WITH(ddp(torch::ones({1, 3})).sum().backward(),
                    ContainsSubstring("a communication hook cannot run a backward"));
  group.barrier();
}
