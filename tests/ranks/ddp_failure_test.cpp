// One rank's backward fails, or its loop is out of step: no rank hangs, and every rank's error names the place.
#include <torch/torch.h>

#include <chrono>

#include <ddpkit/error.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::DistributedDataParallel;
using ddpkit::ProcessGroup;

namespace {

/// Two tables. The first table's gradient is sparse if forward's argument requests that.
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

/// Returns its input in forward; throws in backward.
struct FailsInBackward : torch::autograd::Function<FailsInBackward> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("a node that fails");
  }
};

/// Two factors in sequence.
struct FactorsImpl : torch::nn::Module {
  FactorsImpl() {
    first = register_parameter("first", torch::full({2}, 2.0));
    second = register_parameter("second", torch::full({2}, 3.0));
  }
  torch::Tensor forward(const torch::Tensor& x, bool second_comes_last, bool fails) {
    torch::Tensor y = x * (second_comes_last ? first : second);
    if (fails) y = FailsInBackward::apply(y);
    return y * (second_comes_last ? second : first);
  }
  torch::Tensor first, second;
};
TORCH_MODULE(Factors);

/// Returns the message of the exception that `action` throws. The exception must come long before any timeout.
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

RANK_TEST("a backward that fails elsewhere, on all ranks, leaves nothing behind for the next one", "[ddp][failure]", 1,
          2, 3) {
  for (const double cap_mb : {0.000001, 1.0}) {
    for (const bool find_unused : {false, true}) {
      CAPTURE(cap_mb, find_unused);
      Factors model;
      DistributedDataParallel ddp(
          model, group,
          {.bucket_cap_mb = cap_mb, .first_bucket_cap_mb = cap_mb, .find_unused_parameters = find_unused});
      const double own = 1.0 + group.rank(), mean = (1.0 + group.world_size()) / 2;
      const auto x = torch::full({2}, own);
      for (int step = 0; step < 4; ++step) {
        // The last factor's gradient arrives before its backward fails; afterwards the other factor's gradient arrives
        // first.
        const bool second_comes_last = step % 2 == 0;
        CHECK_THROWS_WITH(ddp(x, second_comes_last, true).sum().backward(), ContainsSubstring("a node that fails"));
        model->zero_grad();
        ddp(x, !second_comes_last, false).sum().backward();
        CHECK(torch::allclose(model->first.grad(), torch::full({2}, 3 * mean)));
        CHECK(torch::allclose(model->second.grad(), torch::full({2}, 2 * mean)));
        model->zero_grad();
      }
    }
  }
}
