// Which parameters a backward uses: found in each step, fixed by static_graph, ignored by name, or found from outputs
// of any type.
#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include <ddpkit/parallel/distributed_data_parallel.h>

#include "ranks/branches.h"
#include "ranks/comparisons.h"
#include "support/catch.h"
#include "support/ranks.h"

using namespace ddpkit::testing;
using ddpkit::DistributedDataParallel;
using ddpkit::DistributedDataParallelOptions;
using ddpkit::ProcessGroup;

namespace {

/// Returns the branches that rank `rank` uses in step `step`. No branch has a gradient on all ranks, and no rank uses
/// "right" in step 2.
std::string branches_of(std::int64_t step, int rank) {
  if (step == 2) return "l";
  return (step + rank) % 2 == 0 ? "l" : "r";
}

}  // namespace

RANK_TEST("find_unused_parameters: ranks use different parameters in each step", "[ddp][options]", 2, 3) {
  for (DistributedDataParallelOptions options : kMemories) {
    options.find_unused_parameters = true;
    options.bucket_cap_mb = options.first_bucket_cap_mb = 0.01;
    Branches model, reference;
    DistributedDataParallel ddp(model, group, options);
    for (std::int64_t step = 0; step < 4; ++step) {
      INFO("step " << step << " arena " << options.arena << " view " << options.gradient_as_bucket_view);
      forget_gradients(*model);
      forget_gradients(*reference);
      const auto expected = expected_gradients(*reference, group.world_size(), [&](int r) {
        return reference(input(step, r), branches_of(step, r)).pow(2).mean();
      });
      ddp(input(step, group.rank()), branches_of(step, group.rank())).pow(2).mean().backward();
      check_gradients(*model, expected, group);
    }
  }
}

RANK_TEST("a gradient that no rank has used stays as it was", "[ddp][options]", 2, 3) {
  for (const bool arena : {true, false}) {
    Branches model;
    DistributedDataParallel ddp(model, group, {.find_unused_parameters = true, .arena = arena});
    ddp(input(0, group.rank()), "lr").sum().backward();
    // Differs per rank, so a mean would change the value.
    model->right->weight.mutable_grad().add_(group.rank());
    const torch::Tensor before = model->right->weight.grad().clone();
    model->trunk->weight.mutable_grad().reset();
    ddp(input(1, group.rank()), "l").sum().backward();
    CHECK(torch::equal(model->right->weight.grad(), before));
    CHECK(model->trunk->weight.grad().defined());
  }
}

RANK_TEST("a parameter whose gradient was reset after a backward is not used", "[ddp][options]", 1, 2, 3) {
  for (DistributedDataParallelOptions options : kMemories) {
    for (const bool throws : {false, true}) {
      CAPTURE(options.arena, options.gradient_as_bucket_view, throws);
      options.find_unused_parameters = true;
      Branches model;
      DistributedDataParallel ddp(model, group, options);
      torch::Tensor x = input(0, group.rank()).requires_grad_() * 1;
      if (throws) {
        x.register_hook([](const torch::Tensor&) -> void { throw std::runtime_error("a node that fails"); });
        CHECK_THROWS_WITH(ddp(x, "lr").sum().backward(), ContainsSubstring("a node that fails"));
      } else {
        const auto no_sync = ddp.no_sync();
        ddp(x, "lr").sum().backward();
      }
      CHECK(model->right->weight.grad().defined());
      forget_gradients(*model);
      ddp(input(1, group.rank()), "l").sum().backward();
      CHECK(model->left->weight.grad().defined());
      CHECK_FALSE(model->right->weight.grad().defined());
    }
  }
}

RANK_TEST("unused parameters found from forward's outputs delay no bucket", "[ddp][options]", 2, 3) {
  Branches model;
  DistributedDataParallel ddp(model, group,
                              {.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.01, .find_unused_parameters = true});
  // "right" is first in bucket order, and unused.
  ddp(input(0, group.rank()), "l").sum().backward();
  const auto stats = ddp.stats();
  REQUIRE(stats.buckets.size() >= 3);
  CHECK(stats.buckets.at(0).started_us < stats.last_gradient_us);
}

RANK_TEST("without find_unused_parameters an unused parameter is an error that names it", "[ddp][options]", 2, 3) {
  Branches model;
  DistributedDataParallel ddp(model, group);
  const torch::Tensor loss = ddp(input(0, group.rank()), "l").sum();
  CHECK_THROWS_WITH(loss.backward(), ContainsSubstring("right."));
}

namespace {

/// `side` is part of the loss, but not of forward's output.
struct AsideImpl : torch::nn::Module {
  AsideImpl() {
    main = register_module("main", torch::nn::Linear(kWidth, kWidth));
    side = register_module("side", torch::nn::Linear(kWidth, kWidth));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    aside = side(x);  // Runs first, so its gradient arrives last.
    return main(x);
  }
  torch::nn::Linear main{nullptr}, side{nullptr};
  torch::Tensor aside;
};

}  // namespace

RANK_TEST("a gradient that comes after its bucket was reduced without it is an error that names it", "[ddp][options]",
          2, 3) {
  const auto model = std::make_shared<AsideImpl>();
  DistributedDataParallel ddp(model, group,
                              {.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.01, .find_unused_parameters = true});
  const torch::Tensor output = ddp(input(0, group.rank()));
  const torch::Tensor loss = output.sum() + model->aside.sum();
  CHECK_THROWS_WITH(loss.backward(),
                    ContainsSubstring("parameter side.") && ContainsSubstring("no output of forward comes from it"));
}

RANK_TEST("static_graph: the first backward shows which parameters are used", "[ddp][options]", 2, 3) {
  for (const bool arena : {true, false}) {
    Branches model, reference;
    DistributedDataParallel ddp(
        model, group, {.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.01, .static_graph = true, .arena = arena});
    // Rank 0 always uses the left branch, the other ranks the right branch.
    const auto branches = [](int rank) { return rank == 0 ? "l" : "r"; };
    for (std::int64_t step = 0; step < 3; ++step) {
      forget_gradients(*model);
      forget_gradients(*reference);
      const auto expected = expected_gradients(
          *reference, group.world_size(), [&](int r) { return reference(input(step, r), branches(r)).pow(2).mean(); });
      ddp(input(step, group.rank()), branches(group.rank())).pow(2).mean().backward();
      check_gradients(*model, expected, group);
      // The first step reduces at the end of backward, later steps within backward.
      const auto stats = ddp.stats();
      CHECK((stats.buckets.at(0).started_us < stats.last_gradient_us) == (step > 0));
    }
    CHECK(ddp.stats().rebuilds == 1);
  }
}

RANK_TEST("static_graph: a backward that breaks the promise is an error that names the parameter", "[ddp][options]", 2,
          3) {
  Branches model;
  DistributedDataParallel ddp(model, group, {.static_graph = true});
  ddp(input(0, group.rank()), "lr").sum().backward();
  const torch::Tensor loss = ddp(input(1, group.rank()), "r").sum();
  CHECK_THROWS_WITH(loss.backward(), ContainsSubstring("left."));
}

RANK_TEST("parameters_to_ignore are neither broadcast nor averaged", "[ddp][options]", 2, 3) {
  Branches model(static_cast<std::uint64_t>(group.rank()));
  const torch::Tensor own = model->left->weight.detach().clone();
  DistributedDataParallel ddp(model, group, {.parameters_to_ignore = {"left.weight", "left.bias"}});
  CHECK(torch::equal(model->left->weight, own));
  Branches first(0);
  CHECK(torch::equal(model->right->weight, first->right->weight));
  ddp(input(0, group.rank()), "lr").pow(2).mean().backward();
  // One process computes all ranks, each with a separate "left".
  for (int r = 0; r < group.world_size(); ++r) {
    Branches of_rank(static_cast<std::uint64_t>(r));
    {
      const torch::NoGradGuard no_grad;
      for (const auto& item : first->named_parameters()) {
        if (!item.key().starts_with("left.")) of_rank->named_parameters()[item.key()].copy_(item.value());
      }
    }
    const torch::Tensor loss = of_rank(input(0, r), "lr").pow(2).mean();
    loss.backward();
    for (const auto& item : first->named_parameters()) {
      const torch::Tensor gradient = of_rank->named_parameters()[item.key()].grad();
      torch::Tensor& expected = first->named_parameters()[item.key()].mutable_grad();
      if (item.key().starts_with("left.")) {
        if (r == group.rank()) expected = gradient;
      } else {
        expected = expected.defined() ? expected + gradient / group.world_size() : gradient / group.world_size();
      }
    }
  }
  for (const auto& item : first->named_parameters()) {
    INFO(item.key());
    CHECK(at::allclose(model->named_parameters()[item.key()].grad(), item.value().grad(), 0, 1e-12));
  }
  check_same_bits_on_all_ranks(group, model->right->weight.grad());
}

TEST_CASE("parameters_to_ignore must exist", "[ddp][options]") {
  const auto group = ddpkit::init_process_group({.environment = ddpkit::LaunchEnvironment{}});
  Branches model;
  using Ddp = DistributedDataParallel<BranchesImpl>;
  CHECK_THROWS_WITH(Ddp(model, group, {.parameters_to_ignore = {"middle.weight"}}), ContainsSubstring("middle.weight"));
}

RANK_TEST("gradient accumulation under no_sync is exact, also for parameters used in one part only", "[ddp][options]",
          2, 3) {
  for (const bool arena : {true, false}) {
    Branches model, reference;
    DistributedDataParallel ddp(model, group, {.find_unused_parameters = true, .arena = arena});
    const auto parts = [](std::int64_t micro, int rank) -> std::string {
      if (micro == 0) return rank == 0 ? "l" : "";
      return micro == 2 ? "r" : "";
    };
    const auto expected = expected_gradients(*reference, group.world_size(), [&](int r) {
      torch::Tensor loss = torch::zeros({}, torch::kDouble);
      for (std::int64_t micro = 0; micro < 4; ++micro)
        loss = loss + reference(input(micro, r), parts(micro, r)).pow(2).mean();
      return loss;
    });
    for (std::int64_t micro = 0; micro < 4; ++micro) {
      std::optional<ddpkit::Reducer::NoSync> no_sync;
      if (micro < 3) no_sync.emplace(ddp.no_sync());
      ddp(input(micro, group.rank()), parts(micro, group.rank())).pow(2).mean().backward();
    }
    check_gradients(*model, expected, group);
  }
}

namespace mine {

struct Detection {
  torch::Tensor boxes, scores;
};
std::vector<at::Tensor> output_tensors(const Detection& detection) { return {detection.boxes, detection.scores}; }

struct Opaque {
  torch::Tensor hidden;
};

template <class Outputs>
struct DetectorImpl : torch::nn::Module {
  DetectorImpl() {
    torch::manual_seed(13);
    boxes = register_module("boxes", torch::nn::Linear(kWidth, kWidth));
    scores = register_module("scores", torch::nn::Linear(kWidth, kWidth));
    unused = register_module("unused", torch::nn::Linear(kWidth, kWidth));
    to(torch::kDouble);
  }
  Outputs forward(const torch::Tensor& x, double scale, bool) {
    const torch::Tensor b = boxes(x) * scale, s = scores(x);
    if constexpr (std::is_same_v<Outputs, Opaque>) {
      return {b + s};
    } else if constexpr (std::is_same_v<Outputs, std::vector<std::map<std::string, torch::Tensor>>>) {
      return {{{"boxes", b}}, {{"scores", s}}};
    } else {
      return {b, s};
    }
  }
  torch::nn::Linear boxes{nullptr}, scores{nullptr}, unused{nullptr};
};

template <class Outputs, class Sum>
void check_outputs(ProcessGroup& group, bool known, const Sum& sum) {
  const auto model = std::make_shared<DetectorImpl<Outputs>>();
  DistributedDataParallel<DetectorImpl<Outputs>> ddp(
      model, group, {.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.01, .find_unused_parameters = true});
  sum(ddp(input(0, group.rank()), 2.0, true)).backward();
  CHECK_FALSE(model->unused->weight.grad().defined());
  // Each row of a weight's gradient is the sum of the inputs; forward doubles the boxes.
  torch::Tensor row = torch::zeros(kWidth, torch::kDouble);
  for (int r = 0; r < group.world_size(); ++r) row += input(0, r).sum(0) / group.world_size();
  const torch::Tensor rows = row.expand({kWidth, kWidth}), ones = torch::ones(kWidth, torch::kDouble);
  CHECK(largest_difference(model->boxes->weight.grad(), 2 * rows) < 1e-12);
  CHECK(largest_difference(model->scores->weight.grad(), rows) < 1e-12);
  CHECK(largest_difference(model->boxes->bias.grad(), 2 * kRows * ones) < 1e-12);
  CHECK(largest_difference(model->scores->bias.grad(), kRows * ones) < 1e-12);
  const auto stats = ddp.stats();
  CHECK((stats.buckets.at(0).started_us < stats.last_gradient_us) == known);
}

}  // namespace mine

RANK_TEST("modules with any arguments and any return type", "[ddp][options]", 2, 3) {
  using mine::check_outputs;
  check_outputs<mine::Detection>(group, true, [](const auto& d) { return d.boxes.sum() + d.scores.sum(); });
  check_outputs<std::tuple<torch::Tensor, torch::Tensor>>(
      group, true, [](const auto& t) { return std::get<0>(t).sum() + std::get<1>(t).sum(); });
  check_outputs<std::vector<std::map<std::string, torch::Tensor>>>(
      group, true, [](const auto& v) { return v[0].at("boxes").sum() + v[1].at("scores").sum(); });
  // DDP finds no tensors in this type: unused parameters are known only when backward ends.
  check_outputs<mine::Opaque>(group, false, [](const auto& o) { return o.hidden.sum(); });
}

namespace {

/// Uses no parameter if `scale` is false. Then the output is the input or depends only on it.
struct ScaleImpl : torch::nn::Module {
  ScaleImpl() { weight = register_parameter("weight", torch::full({kWidth}, 2.0, torch::kDouble)); }
  torch::Tensor forward(const torch::Tensor& x, bool scales, bool copies) {
    if (scales) return x * weight;
    return copies ? x * 1 : x;
  }
  torch::Tensor weight;
};
TORCH_MODULE(Scale);

}  // namespace

RANK_TEST("a rank that uses no parameter gives zeros", "[ddp][options]", 2, 3) {
  for (const bool static_graph : {false, true}) {
    for (const bool copies : {false, true}) {
      for (const bool arena : {false, true}) {
        CAPTURE(static_graph, copies, arena);
        Scale model, reference;
        DistributedDataParallel ddp(
            model, group, {.find_unused_parameters = !static_graph, .static_graph = static_graph, .arena = arena});
        for (std::int64_t step = 0; step < 4; ++step) {
          // All ranks but one use the parameter; no rank does in step 3, unless the graph is static.
          const auto uses = [&](int rank) {
            return static_graph ? rank != 0 : step != 3 && rank != step % group.world_size();
          };
          forget_gradients(*model);
          forget_gradients(*reference);
          const auto of_rank = [&](auto& net, int r) {
            return net(input(step, r).requires_grad_(), uses(r), copies).pow(2).mean();
          };
          const auto expected =
              expected_gradients(*reference, group.world_size(), [&](int r) { return of_rank(reference, r); });
          of_rank(ddp, group.rank()).backward();
          CHECK(ddp.stats().steps == static_cast<std::uint64_t>(step + 1));
          check_gradients(*model, expected, group);
        }
      }
    }
  }
}

namespace {

struct Hidden {
  torch::Tensor value;
};

struct HiddenScaleImpl : ScaleImpl {
  Hidden forward(const torch::Tensor& x, bool scales) { return {ScaleImpl::forward(x, scales, true)}; }
};

}  // namespace

RANK_TEST("a rank that uses no parameter is an error if the output's type hides that", "[ddp][options][unused]", 2, 3) {
  for (const std::string& option : std::vector<std::string>{"none", "find_unused_parameters", "static_graph"}) {
    CAPTURE(option);
    const ProcessGroup own = another_group(group, "hidden " + option);
    DistributedDataParallel ddp(
        std::make_shared<HiddenScaleImpl>(), own,
        {.find_unused_parameters = option == "find_unused_parameters", .static_graph = option == "static_graph"});
    // Rank 1's first gradient arrives in step 1, while the others wait for it in step 0.
    const auto train = [&] {
      for (std::int64_t step = 0; step < 2; ++step)
        ddp(input(step, own.rank()).requires_grad_(), (own.rank() == 1) == (step == 1)).value.sum().backward();
    };
    CHECK_THROWS_WITH(train(), ContainsSubstring("up to 2 forward passes ran on a rank") &&
                                   ContainsSubstring("cannot find the tensors in the output of forward"));
    group.barrier();
  }
}

RANK_TEST("an output of an unknown type allows forward passes without a backward", "[ddp][options][unused]", 2, 3) {
  for (const bool find_unused : {false, true}) {
    CAPTURE(find_unused);
    const auto model = std::make_shared<HiddenScaleImpl>();
    DistributedDataParallel ddp(model, group, {.find_unused_parameters = find_unused});
    torch::Tensor expected = torch::zeros(kWidth, torch::kDouble);
    for (int r = 0; r < group.world_size(); ++r) expected += (input(0, r) + input(1, r)).sum(0) / group.world_size();
    for (int round = 0; round < 2; ++round) {
      model->zero_grad();
      ddp(input(2, group.rank()), true);
      model->eval();
      for (int i = 0; i < group.rank(); ++i) ddp(input(2, group.rank()), true);
      model->train();
      for (int i = 0; i < group.rank(); ++i) {
        const torch::NoGradGuard no_grad;
        ddp(input(2, group.rank()), true);
      }
      (ddp(input(0, group.rank()), true).value.sum() + ddp(input(1, group.rank()), true).value.sum()).backward();
      CHECK(largest_difference(model->weight.grad(), expected) < 1e-12);
      check_same_bits_on_all_ranks(group, model->weight.grad());
    }
  }
}

namespace {

/// Behaves like a checkpoint whose part detaches its input.
struct NoGradient : torch::autograd::Function<NoGradient> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    return {torch::Tensor()};
  }
};

struct PartlyImpl : torch::nn::Module {
  PartlyImpl() {
    first = register_parameter("first", torch::full({kWidth}, 2.0, torch::kDouble));
    second = register_parameter("second", torch::full({kWidth}, 3.0, torch::kDouble));
  }
  torch::Tensor forward(const torch::Tensor& x, bool both) {
    const torch::Tensor part = x * first;
    return (both ? part : NoGradient::apply(part)) + x * second;
  }
  torch::Tensor first, second;
};
TORCH_MODULE(Partly);

}  // namespace

RANK_TEST("a parameter whose gradient is undefined counts as unused", "[ddp][options][unused]", 2, 3) {
  for (DistributedDataParallelOptions options : kMemories) {
    for (const bool static_graph : {false, true}) {
      CAPTURE(static_graph, options.arena, options.gradient_as_bucket_view);
      options.find_unused_parameters = !static_graph;
      options.static_graph = static_graph;
      Partly model, reference;
      DistributedDataParallel ddp(model, group, options);
      for (std::int64_t step = 0; step < 3; ++step) {
        // No rank has a gradient of `first` in step 1, unless the graph is static.
        const auto both = [&](int rank) { return rank == 0 && (static_graph || step != 1); };
        forget_gradients(*model);
        forget_gradients(*reference);
        const auto expected = expected_gradients(*reference, group.world_size(),
                                                 [&](int r) { return reference(input(step, r), both(r)).sum(); });
        ddp(input(step, group.rank()), both(group.rank())).sum().backward();
        check_gradients(*model, expected, group);
      }
      if (static_graph) continue;
      // Differs per rank, so a mean would change the value.
      const torch::Tensor before = torch::full({kWidth}, group.rank(), torch::kDouble);
      model->first.mutable_grad() = before.clone();
      ddp(input(0, group.rank()), false).sum().backward();
      CHECK(torch::equal(model->first.grad(), before));
    }
  }
  const ProcessGroup own = another_group(group, "undefined");
  Partly model;
  DistributedDataParallel ddp(model, own);
  const torch::Tensor loss = ddp(input(0, own.rank()), own.rank() != 1).sum();
  CHECK_THROWS_WITH(loss.backward(),
                    ContainsSubstring("backward on rank 1 gave no gradient to 1 of 2 parameters: first"));
  group.barrier();
}

RANK_TEST("without find_unused_parameters, a rank that uses no parameter is an error that names it everywhere",
          "[ddp][options]", 2, 3) {
  for (const bool copies : {false, true}) {
    const ProcessGroup own = another_group(group, copies ? "none used, copies" : "none used");
    Scale model;
    DistributedDataParallel ddp(model, own);
    const torch::Tensor loss = ddp(input(0, own.rank()).requires_grad_(), own.rank() != 1, copies).sum();
    CHECK_THROWS_WITH(loss.backward(),
                      ContainsSubstring("backward on rank 1 gave no gradient to 1 of 1 parameters: weight"));
    group.barrier();
  }
}

RANK_TEST("what gives no gradient to any parameter is no backward of the wrapper", "[ddp][options]", 2) {
  Scale model;
  DistributedDataParallel ddp(model, group);
  const auto x = input(0, group.rank()).requires_grad_();
  const torch::Tensor none = ddp(x, false, true);
  CHECK(torch::equal(torch::autograd::grad({none.sum()}, {x})[0], torch::ones_like(x)));
  // Frozen, like a discriminator while the generator learns.
  model->weight.requires_grad_(false);
  ddp(x, true, false).sum().backward();
  CHECK(torch::equal(x.grad(), torch::full_like(x, 2)));
  model->weight.requires_grad_(true);
  CHECK(ddp.stats().steps == 0);
  ddp(x, true, false).sum().backward();
  CHECK(ddp.stats().steps == 1);
  check_same_bits_on_all_ranks(group, model->weight.grad());
}
