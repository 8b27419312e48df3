// What the ranks agree on when the model is wrapped: memory formats, types, requires_grad, ties, options.
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include <ddpkit/error.h>
#include <ddpkit/parallel/comm_hooks.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/parallel/power_sgd.h>

#include "ranks/comparisons.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::DistributedDataParallel;
using ddpkit::DistributedDataParallelOptions;
using ddpkit::ProcessGroup;
using ddpkit::testing::another_group;
using ddpkit::testing::check_same_bits_on_all_ranks;
using ddpkit::testing::flat_gradients;

namespace {

/// The arena allocates `large`, but not `small`.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(1);
    small = register_module("small", torch::nn::Conv2d(4, 4, 3));
    large = register_module("large", torch::nn::Linear(16, 128));
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::tanh(large(torch::tanh(small(x)).flatten(1))); }
  torch::nn::Conv2d small{nullptr};
  torch::nn::Linear large{nullptr};
};
TORCH_MODULE(Net);

/// Changes the order in memory; values stay.
void change_strides(Net& net) {
  net->small->weight.set_data(net->small->weight.detach().contiguous(torch::MemoryFormat::ChannelsLast));
  net->large->weight.set_data(net->large->weight.detach().t().contiguous().t());
}

torch::Tensor batch_of(const ProcessGroup& group, int step) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + group.rank()));
  return torch::randn({6, 4, 4, 4});
}

/// Returns whether this rank differs from the others.
bool is_odd(const ProcessGroup& group) { return group.rank() == group.world_size() - 1; }

std::string failure_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const ddpkit::ModelMismatch& error) {
    return std::string("ModelMismatch: ") + error.what();
  } catch (const ddpkit::PeerLost& error) {
    return std::string("PeerLost: ") + error.what();
  } catch (const ddpkit::Error& error) {
    return std::string("Error: ") + error.what();
  }
  return "threw nothing";
}

}  // namespace

RANK_TEST("gradients are right where a rank's parameters have other strides", "[ddp]", 2, 3) {
  struct Way {
    DistributedDataParallelOptions options;
    ddpkit::CommHook hook;
    double tolerance;
  };
  namespace hooks = ddpkit::comm_hooks;
  const std::vector<Way> ways = {
      {{}, {}, 1e-6},
      {{.arena = false}, {}, 1e-6},
      {{.gradient_as_bucket_view = true}, {}, 1e-6},
      {{.find_unused_parameters = true}, {}, 1e-6},
      {{}, hooks::all_reduce(group), 1e-6},
      {{.gradient_as_bucket_view = true}, hooks::bf16_compress(group), 1e-2},
      {{}, hooks::PowerSGD(group, {.matrix_approximation_rank = 64, .start_powerSGD_iter = 0}), 1e-4},
  };
  for (const Way& way : ways) {
    for (const bool before : {true, false}) {
      for (const bool of_first : {true, false}) {
        CAPTURE(&way - ways.data(), before, of_first);
        const bool changes = of_first ? group.rank() == 0 : is_odd(group);
        Net net, alone;
        if (changes && before) change_strides(net);
        DistributedDataParallel ddp(net, group, way.options);
        if (changes && !before) change_strides(net);
        if (way.hook) ddp.register_comm_hook(way.hook);
        for (int step = 0; step < 3; ++step) {
          const torch::Tensor x = batch_of(group, step);
          net->zero_grad(step < 2);
          alone->zero_grad();
          ddp(x).pow(2).mean().backward();
          alone(group.all_gather(x).flatten(0, 1)).pow(2).mean().backward();
          CHECK(torch::allclose(flat_gradients(*net), flat_gradients(*alone), way.tolerance, way.tolerance));
          check_same_bits_on_all_ranks(group, flat_gradients(*net));
        }
      }
    }
  }
}

RANK_TEST("a parameter cast after wrapping is named with both types, on all ranks", "[ddp]", 2, 3) {
  for (const bool alike : {true, false}) {
    const ProcessGroup own = another_group(group, alike ? "alike" : "other");
    Net net;
    DistributedDataParallel ddp(net, own);
    ddp(batch_of(group, 0)).sum().backward();
    group.barrier();  // The first backward has ended on all ranks.
    if (alike || is_odd(group)) net->large->to(torch::kDouble);
    const std::string text = failure_of([&] { ddp(batch_of(group, 1)).sum().backward(); });
    CHECK_THAT(text, ContainsSubstring(alike || is_odd(group) ? "ModelMismatch" : "PeerLost"));
    CHECK_THAT(text, ContainsSubstring("parameter large.weight is [128, 16] Double on cpu"));
    CHECK_THAT(text, ContainsSubstring("was [128, 16] Float on cpu"));
  }
}

RANK_TEST("a parameter unfrozen after wrapping is named on all ranks", "[ddp]", 2) {
  for (const bool alike : {true, false}) {
    const ProcessGroup own = another_group(group, alike ? "alike" : "other");
    Net net;
    net->small->weight.requires_grad_(false);
    DistributedDataParallel ddp(net, own);
    ddp(batch_of(group, 0)).sum().backward();
    group.barrier();  // The first backward has ended on all ranks.
    if (alike || is_odd(group)) net->small->weight.requires_grad_(true);
    const std::string text = failure_of([&] { ddp(batch_of(group, 1)).sum().backward(); });
    CHECK_THAT(text, ContainsSubstring(alike || is_odd(group) ? "ModelMismatch" : "PeerLost"));
    CHECK_THAT(text, ContainsSubstring("requires_grad of parameter small.weight is true"));
  }
}

RANK_TEST("a layer frozen after wrapping is unused, or else named", "[ddp]", 2) {
  for (const bool may_be_unused : {true, false}) {
    const ProcessGroup own = another_group(group, may_be_unused ? "unused" : "complete");
    Net net, alone;
    DistributedDataParallel ddp(net, own, {.find_unused_parameters = may_be_unused});
    for (auto& model : {net.ptr(), alone.ptr()}) {
      for (auto& parameter : model->small->parameters()) parameter.requires_grad_(false);
    }
    const torch::Tensor x = batch_of(group, 0);
    const std::string text = failure_of([&] { ddp(x).pow(2).mean().backward(); });
    if (!may_be_unused) {
      CHECK_THAT(text, ContainsSubstring("small.weight"));
      CHECK_THAT(text, ContainsSubstring("requires_grad"));
      continue;
    }
    REQUIRE(text == "threw nothing");
    alone(group.all_gather(x).flatten(0, 1)).pow(2).mean().backward();
    CHECK(!net->small->weight.grad().defined());
    CHECK(torch::allclose(net->large->weight.grad(), alone->large->weight.grad(), 1e-5, 1e-6));
    // Changes back.
    for (auto& model : {net.ptr(), alone.ptr()}) {
      for (auto& parameter : model->small->parameters()) parameter.requires_grad_(true);
      model->zero_grad();
    }
    ddp(x).pow(2).mean().backward();
    alone(group.all_gather(x).flatten(0, 1)).pow(2).mean().backward();
    CHECK(torch::allclose(flat_gradients(*net), flat_gradients(*alone), 1e-5, 1e-6));
  }
}

RANK_TEST("a parameter that is frozen in the first backward of a static graph is named later", "[ddp]", 2) {
  const ProcessGroup own = another_group(group, "static");
  Net net;
  DistributedDataParallel ddp(net, own, {.static_graph = true});
  net->small->weight.requires_grad_(false);
  ddp(batch_of(group, 0)).sum().backward();
  group.barrier();
  net->small->weight.requires_grad_(true);
  CHECK_THAT(failure_of([&] { ddp(batch_of(group, 1)).sum().backward(); }),
             ContainsSubstring("parameter small.weight got a gradient") &&
                 ContainsSubstring("but none in the first backward"));
}

// Adversarial training freezes the discriminator like this while the generator learns.
RANK_TEST("a model may be frozen as a whole between its steps", "[ddp]", 2) {
  Net net, alone;
  DistributedDataParallel ddp(net, group);
  for (int step = 0; step < 3; ++step) {
    const torch::Tensor x = batch_of(group, step);
    for (auto& parameter : net->parameters()) parameter.requires_grad_(false);
    torch::Tensor input = x.clone().requires_grad_();
    ddp(input).sum().backward();
    CHECK(input.grad().defined());
    for (auto& parameter : net->parameters()) parameter.requires_grad_(true);
    net->zero_grad();
    alone->zero_grad();
    ddp(x).pow(2).mean().backward();
    alone(group.all_gather(x).flatten(0, 1)).pow(2).mean().backward();
    CHECK(torch::allclose(flat_gradients(*net), flat_gradients(*alone), 1e-5, 1e-6));
  }
}

RANK_TEST("a layer that is added or replaced after wrapping is named", "[ddp]", 2) {
  for (const bool adds : {true, false}) {
    const ProcessGroup own = another_group(group, adds ? "add" : "replace");
    Net net;
    DistributedDataParallel ddp(net, own);
    if (adds) {
      net->register_module("late", torch::nn::Linear(2, 2));
    } else {
      net->large = net->replace_module("large", torch::nn::Linear(16, 128));
    }
    CHECK_THAT(failure_of([&] { ddp(batch_of(group, 0)); }),
               ContainsSubstring(std::string("parameter ") + (adds ? "late" : "large") + ".weight") &&
                   ContainsSubstring("was registered after the model was wrapped"));
  }
}

RANK_TEST("a model that one rank refuses to wrap is refused on all ranks", "[ddp]", 2, 3) {
  const auto wrap = [&](const DistributedDataParallelOptions& options, bool is_frozen = false) {
    Net net;
    for (torch::Tensor& parameter : net->parameters()) parameter.requires_grad_(!is_frozen);
    const DistributedDataParallel ddp(net, group, options);
  };
  const bool odd = is_odd(group);
  CHECK_THROWS_WITH(wrap({.parameters_to_ignore = {odd ? "no.such" : "small.weight"}}),
                    ContainsSubstring("parameters_to_ignore names no.such"));
  CHECK_THROWS_WITH(wrap({.arena_mb = odd ? -1.0 : 8.0}), ContainsSubstring("arena_mb is -1 MiB"));
  CHECK_THROWS_WITH(wrap({}, odd), ContainsSubstring("at least one parameter that wants a gradient"));
  CHECK_NOTHROW(wrap({}));
}

RANK_TEST("weights that differ between ranks are named", "[ddp]", 2, 3) {
  Net net;
  DistributedDataParallel ddp(net, group);
  torch::optim::SGD optimizer(net->large->parameters(), 0.1);
  ddp(batch_of(group, 0)).pow(2).sum().backward();
  optimizer.step();
  ddpkit::check_same_parameters(ddp);
  if (is_odd(group)) optimizer.step();
  CHECK_THAT(failure_of([&] { ddpkit::check_same_parameters(ddp); }),
             ContainsSubstring("rank 0 has parameter large.weight") && ContainsSubstring("hash"));
}

RANK_TEST("an error of ranks with different numbers of batches mentions join", "[ddp]", 2) {
  Net net;
  DistributedDataParallel ddp(net, group);
  const std::string text = failure_of([&] {
    for (int step = 0; step < (is_odd(group) ? 1 : 2); ++step) ddp(batch_of(group, step)).sum().backward();
    group.barrier();
  });
  CHECK_THAT(text, ContainsSubstring("do not match"));
  if (!is_odd(group)) CHECK_THAT(text, ContainsSubstring("ddpkit::join()"));
}

RANK_TEST("ties, sparse gradients and options are compared between ranks", "[ddp]", 2, 3) {
  const std::string last = std::to_string(group.world_size() - 1);
  struct Tied : torch::nn::Module {
    explicit Tied(bool tied) {
      first = register_parameter("first", torch::ones({3}));
      register_parameter("second", tied ? first : torch::ones({3}));
    }
    torch::Tensor forward() { return first.sum(); }
    torch::Tensor first;
  };
  CHECK_THAT(failure_of([&] { DistributedDataParallel(std::make_shared<Tied>(is_odd(group)), group); }),
             ContainsSubstring("rank " + last + " has parameter second [3] Float (the same tensor as first)"));
  CHECK_THAT(failure_of([&] {
               DistributedDataParallel(
                   torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 3).sparse(is_odd(group))).ptr(), group);
             }),
             ContainsSubstring("rank " + last + " has parameter weight [4, 3] Float (sparse gradient)"));
  CHECK_THAT(failure_of([&] { DistributedDataParallel(Net(), group, {.find_unused_parameters = is_odd(group)}); }),
             ContainsSubstring("find_unused_parameters true"));
}
