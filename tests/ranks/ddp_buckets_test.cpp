// Which gradients are in which bucket of DistributedDataParallel: initially, and after the rebuild by arrival order.
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include <ddpkit/parallel/distributed_data_parallel.h>

#include "ranks/branches.h"
#include "support/catch.h"
#include "support/ranks.h"

using namespace ddpkit::testing;
using ddpkit::DistributedDataParallel;
using ddpkit::DistributedDataParallelOptions;

RANK_TEST("bucket_cap_mb and first_bucket_cap_mb: what is in which bucket", "[ddp][options]", 2, 3) {
  const auto sizes = [&](const DistributedDataParallelOptions& options) {
    Branches model;
    DistributedDataParallel ddp(model, group, options);
    std::vector<std::size_t> parameters;
    for (const auto& bucket : ddp.reducer().buckets()) parameters.push_back(bucket.size());
    return parameters;
  };
  using Sizes = std::vector<std::size_t>;
  // Each of the three layers has a weight of 12,800 bytes and a bias of 320 bytes. The last bias is the first.
  CHECK(sizes({}) == Sizes{6});
  CHECK(sizes({.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.01}) == Sizes{2, 2, 2});
  CHECK(sizes({.bucket_cap_mb = 25, .first_bucket_cap_mb = 0.01}) == Sizes{2, 4});
  CHECK(sizes({.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.02}) == Sizes{4, 2});
}

namespace {

/// Registers parameters in the reverse of the order that bucket plans expect.
struct BackwardsImpl : torch::nn::Module {
  BackwardsImpl() {
    torch::manual_seed(3);
    for (int i = 0; i < 4; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    to(torch::kDouble);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (std::size_t i = layers.size(); i-- > 0;) x = torch::tanh(layers[i](x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Backwards);

/// Two parallel layers. The gradient of the layer that forward uses last arrives first.
struct EitherOrderImpl : torch::nn::Module {
  EitherOrderImpl() {
    torch::manual_seed(4);
    a = register_module("a", torch::nn::Linear(kWidth, kWidth));
    b = register_module("b", torch::nn::Linear(kWidth, kWidth));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x, bool a_is_last) {
    const torch::Tensor first = torch::tanh(a_is_last ? b(x) : a(x));
    const torch::Tensor last = torch::tanh(a_is_last ? a(x) : b(x));
    return first * last;
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(EitherOrder);

}  // namespace

RANK_TEST("buckets are rebuilt once, in the order gradients arrive", "[ddp][options]", 2, 3) {
  for (const DistributedDataParallelOptions& memory : kMemories) {
    DistributedDataParallelOptions options = memory;
    options.bucket_cap_mb = options.first_bucket_cap_mb = 0.01;
    Backwards model, reference;
    DistributedDataParallel ddp(model, group, options);
    const auto before = ddp.reducer().buckets();
    for (std::int64_t step = 0; step < 3; ++step) {
      if (step != 1) forget_gradients(*model), forget_gradients(*reference);  // Once kept over the rebuild.
      const auto expected = expected_gradients(*reference, group.world_size(),
                                               [&](int r) { return reference(input(step, r)).pow(2).mean(); });
      ddp(input(step, group.rank())).pow(2).mean().backward();
      check_gradients(*model, expected, group);
      CHECK(ddp.stats().rebuilds == 1);
      const auto stats = ddp.stats();
      // The initial plan puts the first gradients into the last bucket, so all buckets wait for the last gradient.
      CHECK((stats.buckets.at(0).started_us < stats.last_gradient_us) == (step > 0));
    }
    CHECK(ddp.reducer().buckets() != before);
  }
}

RANK_TEST("ranks whose gradients come in different orders have the buckets of rank 0", "[ddp][options]", 2, 3) {
  const auto a_is_last = [](int rank) { return rank == 0; };
  for (const DistributedDataParallelOptions& memory : kMemories) {
    DistributedDataParallelOptions options = memory;
    options.bucket_cap_mb = options.first_bucket_cap_mb = 0.01;
    EitherOrder model, reference;
    DistributedDataParallel ddp(model, group, options);
    for (std::int64_t step = 0; step < 3; ++step) {
      forget_gradients(*model);
      forget_gradients(*reference);
      const auto expected = expected_gradients(
          *reference, group.world_size(), [&](int r) { return reference(input(step, r), a_is_last(r)).pow(2).mean(); });
      ddp(input(step, group.rank()), a_is_last(group.rank())).pow(2).mean().backward();
      check_gradients(*model, expected, group);
    }
    CHECK(ddp.stats().rebuilds == 1);
    const auto buckets = ddp.reducer().buckets();
    REQUIRE(buckets.size() == 2);
    // Rank 0's order: "a", parameters 0 and 1, is first.
    for (const std::size_t index : buckets[0]) CHECK(index < 2);
  }
}
