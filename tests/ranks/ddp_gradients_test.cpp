// Gradients of all kinds (sparse, complex, half types, of several forwards, and of gradients), compared with one
// process that computes all ranks.
#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <vector>

#include <ddpkit/parallel/distributed_data_parallel.h>

#include "ranks/branches.h"
#include "support/catch.h"
#include "support/ranks.h"

using namespace ddpkit::testing;
using ddpkit::DistributedDataParallel;
using ddpkit::DistributedDataParallelOptions;

RANK_TEST("sparse gradients of embeddings are averaged, whatever rows each rank has", "[ddp][options]", 1, 2, 3) {
  const auto make = [] {
    torch::manual_seed(5);
    torch::nn::Sequential model(torch::nn::Embedding(torch::nn::EmbeddingOptions(50, 16).sparse(true)),
                                torch::nn::Linear(16, 4));
    model->to(torch::kDouble);
    return model;
  };
  const auto rows = [](std::int64_t step, int rank) {
    torch::manual_seed(static_cast<std::uint64_t>(100 * step + rank));
    return torch::randint(0, 50, {3 + 2 * rank});
  };
  auto model = make(), reference = make();
  DistributedDataParallel ddp(model, group);
  for (std::int64_t step = 0; step < 3; ++step) {
    forget_gradients(*model);
    forget_gradients(*reference);
    const auto expected = expected_gradients(*reference, group.world_size(),
                                             [&](int r) { return reference->forward(rows(step, r)).pow(2).mean(); });
    ddp(rows(step, group.rank())).pow(2).mean().backward();
    CHECK(model->parameters()[0].grad().is_sparse());
    check_gradients(*model, expected, group);
  }
}

namespace {

struct ComplexImpl : torch::nn::Module {
  ComplexImpl() {
    torch::manual_seed(7);
    weight = register_parameter("weight", torch::randn({kWidth, kWidth}, torch::kComplexDouble));
    real = register_parameter("real", torch::randn({kWidth}, torch::kDouble));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::abs(torch::matmul(x.to(torch::kComplexDouble), weight)) * real;
  }
  torch::Tensor weight, real;
};
TORCH_MODULE(Complex);

}  // namespace

RANK_TEST("complex parameters beside real ones", "[ddp][options]", 2, 3) {
  for (const DistributedDataParallelOptions& options : kMemories) {
    Complex model, reference;
    DistributedDataParallel ddp(model, group, options);
    const auto expected =
        expected_gradients(*reference, group.world_size(), [&](int r) { return reference(input(0, r)).mean(); });
    ddp(input(0, group.rank())).mean().backward();
    for (std::size_t i = 0; i < expected.size(); ++i)
      CHECK(at::allclose(model->parameters()[i].grad(), expected[i], 0, 1e-12));
  }
}

RANK_TEST("bfloat16 gradients are summed in float and rounded once", "[ddp][options]", 2, 3) {
  torch::manual_seed(11);
  torch::nn::Linear model(64, 64);
  model->to(torch::kBFloat16);
  torch::nn::Linear alone(64, 64);
  alone->to(torch::kBFloat16);
  DistributedDataParallel ddp(model, group);
  const auto batch = [](int rank) {
    torch::manual_seed(static_cast<std::uint64_t>(rank));
    return torch::randn({8, 64}).to(torch::kBFloat16);
  };
  ddp(batch(group.rank())).sum().backward();
  torch::Tensor sum = torch::zeros({64, 64});
  for (int r = 0; r < group.world_size(); ++r) {
    alone->weight.mutable_grad().reset();
    alone(batch(r)).sum().backward();
    sum += alone->weight.grad().to(torch::kFloat);
  }
  CHECK(torch::equal(model->weight.grad(), (sum / group.world_size()).to(torch::kBFloat16)));
}

RANK_TEST("several forwards before one backward, and several losses", "[ddp][options]", 2, 3) {
  for (const bool unused : {false, true}) {
    Branches model, reference;
    // With small buckets: DDP must not reduce a bucket that only the first forward fills.
    DistributedDataParallel ddp(model, group,
                                {.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.01, .find_unused_parameters = unused});
    const auto both = [&](auto& net, int r) {
      const torch::Tensor first = net(input(0, r), "lr");
      const torch::Tensor second = net(input(1, r), "r");
      return first.pow(2).mean() + second.sin().mean();
    };
    auto expected = expected_gradients(*reference, group.world_size(), [&](int r) { return both(reference, r); });
    both(ddp, group.rank()).backward();
    check_gradients(*model, expected, group);
    // Accumulates the gradient of a second loss.
    expected = expected_gradients(*reference, group.world_size(),
                                  [&](int r) { return reference(input(2, r), "lr").exp().mean(); });
    ddp(input(2, group.rank()), "lr").exp().mean().backward();
    check_gradients(*model, expected, group);
  }
}

RANK_TEST("a gradient penalty: double backward through torch::autograd::grad", "[ddp][options]", 2, 3) {
  Branches model, reference;
  DistributedDataParallel ddp(model, group);
  const auto penalty = [](auto& net, torch::Tensor x) {
    x.requires_grad_(true);
    const torch::Tensor out = net(x, "lr").sum();
    const auto gradient = torch::autograd::grad({out}, {x}, {}, true, /*create_graph=*/true)[0];
    return out + gradient.pow(2).sum();
  };
  const auto expected =
      expected_gradients(*reference, group.world_size(), [&](int r) { return penalty(reference, input(0, r)); });
  penalty(ddp, input(0, group.rank())).backward();
  check_gradients(*model, expected, group, 1e-10);
}

RANK_TEST("backward(create_graph=true) is refused with the way to do it", "[ddp][options]", 2, 3) {
  Branches model;
  DistributedDataParallel ddp(model, group);
  const torch::Tensor loss = ddp(input(0, group.rank()), "lr").sum();
  CHECK_THROWS_WITH(loss.backward({}, c10::nullopt, /*create_graph=*/true), ContainsSubstring("torch::autograd::grad"));
  model->zero_grad();  // Otherwise the gradients made before the exception and their graph hold each other.
}

RANK_TEST("a Reducer averages the gradients of a list of tensors", "[ddp]", 1, 2, 3) {
  const auto make = [](bool requires_grad) { return torch::ones({64, 4}).requires_grad_(requires_grad); };
  const torch::Tensor weight = make(true), frozen = make(false), bias = torch::zeros({4}).requires_grad_(true);
  const auto inputs = [](int step, int rank) { return torch::full({2, 64}, 1.0 + step + 10.0 * rank); };
  const auto loss = [&](int step, int rank) {
    return torch::addmm(bias, inputs(step, rank), weight * frozen).square().mean();
  };
  // The mean over ranks of the sums over steps.
  const auto expected = [&](int first, int last) {
    torch::Tensor sum = torch::zeros({});
    for (int step = first; step <= last; ++step)
      for (int rank = 0; rank < group.world_size(); ++rank) sum = sum + loss(step, rank) / group.world_size();
    return torch::autograd::grad({sum}, {weight, bias});
  };
  const auto sum_of_two = expected(0, 1), third = expected(2, 2);

  ddpkit::Reducer reducer({{"weight", weight}, {"frozen", frozen}, {"bias", bias}}, group);
  CHECK(reducer.buckets() == ddpkit::BucketPlan{{1, 0}});
  std::uint64_t hooked = 0;
  const auto step = [&](int number) {
    reducer.prepare_for_forward();
    const torch::Tensor outputs = loss(number, group.rank());
    reducer.prepare_for_backward({outputs});
    outputs.backward();
  };
  const auto check = [&](const std::vector<torch::Tensor>& gradients) {
    CHECK(torch::allclose(weight.grad(), gradients[0]));
    CHECK(torch::allclose(bias.grad(), gradients[1]));
    CHECK_FALSE(frozen.grad().defined());
    weight.mutable_grad().reset();
    bias.mutable_grad().reset();
  };
  {
    std::optional<ddpkit::Reducer::NoSync> guard;
    guard.emplace(reducer.no_sync());
    step(0);
  }
  CHECK(reducer.stats().steps == 0);
  step(1);
  CHECK(reducer.stats().steps == 1);
  check(sum_of_two);

  reducer.register_comm_hook([&, all_reduce = ddpkit::comm_hooks::all_reduce(group)](ddpkit::GradBucket& bucket) {
    hooked += bucket.parameters.size();
    return all_reduce(bucket);
  });
  step(2);
  CHECK(hooked == 2);
  check(third);
}
