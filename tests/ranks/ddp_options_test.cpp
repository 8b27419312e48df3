// Each option of DistributedDataParallel against one process on the joined batch.
#include <torch/torch.h>

#include <ddpkit/comm/error.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::DistributedDataParallel;
using ddpkit::DistributedDataParallelOptions;
using ddpkit::ProcessGroup;

namespace {

constexpr std::int64_t kRows = 6;    // Of each rank's batch.
constexpr std::int64_t kWidth = 40;  // A weight has 12.8 KB: large enough for the arena.

torch::Tensor input(std::int64_t step, int rank) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 * step + rank));
  return torch::randn({kRows, kWidth}, torch::kDouble);
}

/// A trunk and two branches, of which a forward takes those it is told to.
struct BranchesImpl : torch::nn::Module {
  explicit BranchesImpl(std::uint64_t seed = 0) {
    torch::manual_seed(seed);
    trunk = register_module("trunk", torch::nn::Linear(kWidth, kWidth));
    left = register_module("left", torch::nn::Linear(kWidth, kWidth));
    right = register_module("right", torch::nn::Linear(kWidth, kWidth));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x, const std::string& branches) {
    torch::Tensor sum = torch::tanh(trunk(x));
    if (branches.find('l') != std::string::npos) sum = sum + torch::tanh(left(sum));
    if (branches.find('r') != std::string::npos) sum = sum + torch::tanh(right(sum));
    return sum;
  }
  torch::nn::Linear trunk{nullptr}, left{nullptr}, right{nullptr};
};
TORCH_MODULE(Branches);

/// The mean over ranks of what each rank's own backward gives, by one process that plays all of them. Undefined where
/// no rank has a gradient. [param]
template <class LossOfRank>
std::vector<torch::Tensor> expected_gradients(torch::nn::Module& model, int ranks, const LossOfRank& loss_of_rank) {
  torch::Tensor loss = torch::zeros({}, torch::kDouble);
  for (int r = 0; r < ranks; ++r) loss = loss + loss_of_rank(r) / ranks;
  loss.backward();
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : model.parameters())
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : torch::Tensor());
  return gradients;
}

void check_gradients(const torch::nn::Module& model, const std::vector<torch::Tensor>& expected,
                     const ProcessGroup& group, double tolerance = 1e-12) {
  const auto named = model.named_parameters();
  REQUIRE(named.size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    INFO(named[i].key());
    const torch::Tensor gradient = named[i].value().grad();
    REQUIRE(gradient.defined() == expected[i].defined());
    if (!gradient.defined()) continue;
    const torch::Tensor dense = gradient.is_sparse() ? gradient.to_dense() : gradient;
    const torch::Tensor reference = expected[i].is_sparse() ? expected[i].to_dense() : expected[i];
    CHECK(at::allclose(dense, reference, 0, tolerance));
    const auto all = group.all_gather(dense);
    for (int r = 1; r < group.world_size(); ++r) CHECK(torch::equal(all[r], all[0]));
  }
}

void forget_gradients(torch::nn::Module& model) {
  for (auto& parameter : model.parameters()) parameter.mutable_grad().reset();
}

/// Which branches rank `rank` takes in step `step`: none has a gradient everywhere, and in step 2 nobody takes "right".
std::string branches_of(std::int64_t step, int rank) {
  if (step == 2) return "l";
  return (step + rank) % 2 == 0 ? "l" : "r";
}

const std::vector<DistributedDataParallelOptions> kMemories = {
    {}, {.arena = false}, {.gradient_as_bucket_view = true}, {.gradient_as_bucket_view = true, .arena = false}};

}  // namespace

RANK_TEST("bucket_cap_mb and first_bucket_cap_mb: what is in which bucket", "[ddp][options]", 2, 3) {
  const auto sizes = [&](const DistributedDataParallelOptions& options) {
    Branches model;
    DistributedDataParallel ddp(model, group, options);
    std::vector<std::size_t> parameters;
    for (const auto& bucket : ddp.reducer().buckets()) parameters.push_back(bucket.size());
    return parameters;
  };
  using Sizes = std::vector<std::size_t>;
  // Three layers of a weight of 12,800 and a bias of 320 bytes, of which the last bias comes first.
  CHECK(sizes({}) == Sizes{6});
  CHECK(sizes({.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.01}) == Sizes{2, 2, 2});
  CHECK(sizes({.bucket_cap_mb = 25, .first_bucket_cap_mb = 0.01}) == Sizes{2, 4});
  CHECK(sizes({.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.02}) == Sizes{4, 2});
}

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
    const torch::Tensor before = model->right->weight.grad().clone();
    model->trunk->weight.mutable_grad().reset();
    ddp(input(1, group.rank()), "l").sum().backward();
    CHECK(torch::equal(model->right->weight.grad(), before));
    CHECK(model->trunk->weight.grad().defined());
  }
}

RANK_TEST("unused parameters hold up no bucket when forward's outputs tell", "[ddp][options]", 2, 3) {
  Branches model;
  DistributedDataParallel ddp(model, group,
                              {.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.01, .find_unused_parameters = true});
  // "right" comes first in bucket order, and is not used.
  ddp(input(0, group.rank()), "l").sum().backward();
  const auto trace = ddp.reducer().last_backward().value();
  REQUIRE(trace.buckets.size() >= 3);
  CHECK(trace.buckets[0].started < trace.last_gradient);
}

RANK_TEST("without find_unused_parameters an unused parameter is an error that names it", "[ddp][options]", 2, 3) {
  Branches model;
  DistributedDataParallel ddp(model, group);
  const torch::Tensor loss = ddp(input(0, group.rank()), "l").sum();
  CHECK_THROWS_WITH(loss.backward(), ContainsSubstring("right."));
}

RANK_TEST("static_graph: the first backward shows which parameters are used", "[ddp][options]", 2, 3) {
  for (const bool arena : {true, false}) {
    Branches model, reference;
    DistributedDataParallel ddp(
        model, group, {.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.01, .static_graph = true, .arena = arena});
    // Rank 0 takes the left branch, the others the right one, always.
    const auto branches = [](int rank) { return rank == 0 ? "l" : "r"; };
    for (std::int64_t step = 0; step < 3; ++step) {
      forget_gradients(*model);
      forget_gradients(*reference);
      const auto expected = expected_gradients(
          *reference, group.world_size(), [&](int r) { return reference(input(step, r), branches(r)).pow(2).mean(); });
      ddp(input(step, group.rank()), branches(group.rank())).pow(2).mean().backward();
      check_gradients(*model, expected, group);
      // Not before the end in the first one, within backward from then on.
      const auto trace = ddp.reducer().last_backward().value();
      CHECK((trace.buckets[0].started < trace.last_gradient) == (step > 0));
    }
    CHECK(ddp.reducer().rebuilds() == 1);
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
  ddp(input(0, group.rank()), "lr").sum().backward();
  const auto left = group.all_gather(model->left->weight.grad());
  const auto right = group.all_gather(model->right->weight.grad());
  for (int r = 1; r < group.world_size(); ++r) {
    CHECK_FALSE(torch::equal(left[r], left[0]));
    CHECK(torch::equal(right[r], right[0]));
  }
}

TEST_CASE("parameters_to_ignore must exist", "[ddp][options]") {
  const auto group = ddpkit::init_process_group({.environment = ddpkit::LaunchEnvironment{}});
  Branches model;
  using Ddp = DistributedDataParallel<BranchesImpl>;
  CHECK_THROWS_WITH(Ddp(model, group, {.parameters_to_ignore = {"middle.weight"}}), ContainsSubstring("middle.weight"));
}

namespace {

/// Registered in the order in which they are used last to first, against what bucket plans expect.
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

}  // namespace

RANK_TEST("buckets are rebuilt once, in the order gradients arrive", "[ddp][options]", 2, 3) {
  for (const DistributedDataParallelOptions& memory : kMemories) {
    DistributedDataParallelOptions options = memory;
    options.bucket_cap_mb = options.first_bucket_cap_mb = 0.01;
    Backwards model, reference;
    DistributedDataParallel ddp(model, group, options);
    const auto before = ddp.reducer().buckets();
    for (std::int64_t step = 0; step < 3; ++step) {
      if (step != 1) forget_gradients(*model), forget_gradients(*reference);  // Kept over the rebuild once.
      const auto expected = expected_gradients(*reference, group.world_size(),
                                               [&](int r) { return reference(input(step, r)).pow(2).mean(); });
      ddp(input(step, group.rank())).pow(2).mean().backward();
      check_gradients(*model, expected, group);
      CHECK(ddp.reducer().rebuilds() == 1);
      const auto trace = ddp.reducer().last_backward().value();
      // The plan from registration order has the first gradients' bucket last, so that all wait for the end.
      CHECK((trace.buckets[0].started < trace.last_gradient) == (step > 0));
    }
    CHECK(ddp.reducer().buckets() != before);
  }
}

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
    // Small buckets: one that only the first forward fills must not go without it.
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
    // A second loss, whose gradient is added.
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
  model->zero_grad();  // Else the gradients that were made before it threw hold their graph, and it holds them.
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
  const auto gradient = group.all_gather(model->boxes->weight.grad());
  for (int r = 1; r < group.world_size(); ++r) CHECK(torch::equal(gradient[r], gradient[0]));
  const auto trace = ddp.reducer().last_backward().value();
  CHECK((trace.buckets[0].started < trace.last_gradient) == known);
}

}  // namespace mine

RANK_TEST("modules with any arguments and any return type", "[ddp][options]", 2, 3) {
  using mine::check_outputs;
  check_outputs<mine::Detection>(group, true, [](const auto& d) { return d.boxes.sum() + d.scores.sum(); });
  check_outputs<std::tuple<torch::Tensor, torch::Tensor>>(
      group, true, [](const auto& t) { return std::get<0>(t).sum() + std::get<1>(t).sum(); });
  check_outputs<std::vector<std::map<std::string, torch::Tensor>>>(
      group, true, [](const auto& v) { return v[0].at("boxes").sum() + v[1].at("scores").sum(); });
  // Nobody can look into this one: what is unused shows when backward ends.
  check_outputs<mine::Opaque>(group, false, [](const auto& o) { return o.hidden.sum(); });
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
      std::optional<ddpkit::DistributedDataParallelBase::NoSync> no_sync;
      if (micro < 3) no_sync.emplace(ddp.reducer());
      ddp(input(micro, group.rank()), parts(micro, group.rank())).pow(2).mean().backward();
    }
    check_gradients(*model, expected, group);
  }
}

RANK_TEST("the arena: gradients are reduced where autograd makes them", "[ddp][options][arena]", 2, 3) {
  Branches model;
  torch::Tensor outlives;
  {
    DistributedDataParallel ddp(model, group);
    REQUIRE(ddp.reducer().arena());
    ddp(input(0, group.rank()), "lr").sum().backward();
    const auto stats = ddp.reducer().arena().value();
    CHECK(stats.in_use >= 3 * kWidth * kWidth * sizeof(double));
    CHECK(stats.peak >= stats.in_use);
    CHECK(stats.reserved <= stats.capacity);
    CHECK(stats.allocations > 0);
    // In a steady state nothing more is taken from the system.
    for (std::int64_t step = 1; step < 20; ++step) {
      forget_gradients(*model);
      ddp(input(step, group.rank()), "lr").sum().backward();
    }
    CHECK(ddp.reducer().arena()->reserved == stats.reserved);
    outlives = model->trunk->weight.grad();
  }
  const torch::Tensor copy = outlives.clone();
  torch::randn({300, 300}).matmul(torch::randn({300, 300}));
  CHECK(torch::equal(outlives, copy));
}

RANK_TEST("the arena can be switched off, and a full one is only slower", "[ddp][options][arena]", 2, 3) {
  Branches off;
  DistributedDataParallel without(off, group, {.arena = false});
  CHECK_FALSE(without.reducer().arena());
  Branches model, reference;
  // Room for the gradients alone: whatever else is allocated finds it full.
  DistributedDataParallel ddp(model, group, {.arena_mb = 0.001});
  REQUIRE(ddp.reducer().arena());
  std::vector<torch::Tensor> hoard;
  for (int i = 0; i < 100; ++i) hoard.push_back(torch::zeros({kWidth, kWidth}, torch::kDouble));
  CHECK(ddp.reducer().arena()->refused > 0);
  const auto expected = expected_gradients(*reference, group.world_size(),
                                           [&](int r) { return reference(input(0, r), "lr").pow(2).mean(); });
  ddp(input(0, group.rank()), "lr").pow(2).mean().backward();
  check_gradients(*model, expected, group);
  CHECK(ddp.reducer().arena()->in_use <= ddp.reducer().arena()->capacity);
}

RANK_TEST("two models on one group share an arena", "[ddp][options][arena]", 2, 3) {
  Branches first(1), second(2), first_alone(1), second_alone(2);
  DistributedDataParallel a(first, group), b(second, group);
  const auto loss = [](auto& x, auto& y, int r) { return x(y(input(0, r), "lr"), "lr").pow(2).mean(); };
  torch::Tensor joined = torch::zeros({}, torch::kDouble);
  for (int r = 0; r < group.world_size(); ++r)
    joined = joined + loss(first_alone, second_alone, r) / group.world_size();
  joined.backward();
  loss(a, b, group.rank()).backward();
  for (const auto& [model, alone] : {std::pair(first, first_alone), std::pair(second, second_alone)}) {
    for (std::size_t i = 0; i < model->parameters().size(); ++i)
      CHECK(at::allclose(model->parameters()[i].grad(), alone->parameters()[i].grad(), 0, 1e-12));
  }
}
