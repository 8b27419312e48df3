// One rank's backward fails, or its loop is out of step: nobody hangs, and everybody is told where.
#include <torch/torch.h>

#include <chrono>

#include <ddpkit/comm/error.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::DistributedDataParallel;
using ddpkit::ProcessGroup;

namespace {

/// Two tables; the first one's gradient is sparse where forward is told so.
struct TablesImpl : torch::nn::Module {
  TablesImpl() {
    torch::manual_seed(1);
    first = register_parameter("first", torch::randn({20, 8}));
    second = register_parameter("second", torch::randn({8, 8}));
  }
  torch::Tensor forward(const torch::Tensor& rows, bool sparse) {
    return torch::embedding(first, rows, -1, false, sparse).matmul(second);
  }
  torch::Tensor first, second;
};
TORCH_MODULE(Tables);

/// The message of what `action` throws, which comes long before any timeout.
template <class Expected, class Action>
std::string failure_of(const Action& action) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    action();
  } catch (const Expected& error) {
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));
    return error.what();
  }
  FAIL("threw nothing");
  return {};
}

}  // namespace

RANK_TEST("an error in one rank's backward reaches the others, which would wait for it", "[ddp][failure]", 2, 3) {
  for (const std::string kind : {"sparse", "create_graph"}) {
    const ProcessGroup own = ddpkit::testing::another_group(group, kind);
    Tables model;
    DistributedDataParallel ddp(model, own, {.bucket_cap_mb = 0.0001, .first_bucket_cap_mb = 0.0001});
    const bool fails = own.rank() == 1;
    const auto step = [&] {
      ddp(torch::arange(4), fails && kind == "sparse")
          .sum()
          .backward({}, c10::nullopt, /*create_graph=*/fails && kind == "create_graph");
    };
    const std::string text = fails ? failure_of<ddpkit::InvalidArgument>(step) : failure_of<ddpkit::PeerLost>(step);
    INFO(text);
    CHECK_THAT(text, ContainsSubstring(kind == "sparse" ? "is sparse" : "create_graph"));
    CHECK_THAT(text, ContainsSubstring(kind == "sparse" ? "first" : "second"));
    if (!fails) CHECK_THAT(text, ContainsSubstring("rank 1"));
    group.barrier();
  }
}

RANK_TEST("a rank whose loop is out of step is named, with both calls", "[ddp][failure]", 2, 3) {
  const ProcessGroup own = ddpkit::testing::another_group(group, "out of step");
  Tables model;
  DistributedDataParallel ddp(model, own);
  const std::string text = failure_of<ddpkit::CollectiveMismatch>([&] {
    for (int step = 0; step < 4; ++step) {
      if (step == 2 && own.rank() == 1) own.all_reduce(torch::ones({3}));  // A metric, on one rank only.
      ddp(torch::arange(4), false).sum().backward();
    }
  });
  INFO(text);
  CHECK_THAT(text, ContainsSubstring("rank 1"));
  CHECK_THAT(text, ContainsSubstring("all_reduce"));
  group.barrier();
}

RANK_TEST("a rank that leaves the loop early is named", "[ddp][failure]", 2, 3) {
  const ProcessGroup own = ddpkit::testing::another_group(group, "leaves early");
  Tables model;
  DistributedDataParallel ddp(model, own);
  const auto loop = [&] {
    for (int step = 0; step < (own.rank() == 1 ? 2 : 4); ++step) ddp(torch::arange(4), false).sum().backward();
    own.barrier();
  };
  const std::string text = failure_of<ddpkit::CollectiveMismatch>(loop);
  INFO(text);
  CHECK_THAT(text, ContainsSubstring("rank 1"));
  CHECK_THAT(text, ContainsSubstring("barrier"));
  group.barrier();
}
