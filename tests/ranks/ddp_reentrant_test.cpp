// A backward within a backward (reentrant activation checkpointing): backward recomputes parts of the model and runs a
// nested backward.
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ddpkit/error.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "ranks/branches.h"
#include "support/catch.h"
#include "support/checkpoint.h"
#include "support/ranks.h"

using namespace ddpkit::testing;
using ddpkit::DistributedDataParallel;
using ddpkit::DistributedDataParallelOptions;

namespace {

using Part = Checkpoint::Block;

/// Layers in sequence. Backward recomputes the selected layers.
struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(std::vector<bool> checkpointed) : checkpointed(std::move(checkpointed)) {
    torch::manual_seed(3);
    for (std::size_t i = 0; i < this->checkpointed.size(); ++i) layers->push_back(torch::nn::Linear(kWidth, kWidth));
    register_module("layers", layers);
    unused = register_parameter("unused", torch::ones({kWidth}), /*requires_grad=*/false);
    to(torch::kDouble);
  }
  torch::Tensor forward(torch::Tensor x) {
    if (uses_all) x = x * unused;  // Its gradient comes last.
    for (std::size_t i = 0; i < checkpointed.size(); ++i) {
      const Part part = [this, i, layer = layers[i]->as<torch::nn::Linear>()](const torch::Tensor& y) {
        if (fails && i == 0 && torch::GradMode::is_enabled()) throw std::runtime_error("a layer that fails");
        return torch::tanh(layer->forward(y));
      };
      x = checkpointed[i] ? Checkpoint::apply(x, part) : part(x);
    }
    return x;
  }
  std::vector<bool> checkpointed;
  bool uses_all = false;  ///< Uses the parameter `unused` too.
  bool fails = false;     ///< The first layer throws when backward recomputes it.
  torch::nn::ModuleList layers;
  torch::Tensor unused;
};
TORCH_MODULE(Chain);

// Backward starts with the last layer.
const std::vector<std::vector<bool>> kCheckpointed = {{false, false, true}, {false, true, true},  {true, true, true},
                                                      {true, false, true},  {true, false, false}, {false, true, false}};

/// A checkpoint has a backward only if its input requires a gradient.
torch::Tensor wanted_input(std::int64_t step, int rank) { return input(step, rank).requires_grad_(); }

void check_steps(const ddpkit::ProcessGroup& group, const std::vector<bool>& checkpointed, bool has_unused,
                 const DistributedDataParallelOptions& options) {
  Chain model(checkpointed), reference(std::vector<bool>(checkpointed.size(), false));
  model->unused.requires_grad_(has_unused);
  DistributedDataParallel ddp(model, group, options);
  for (std::int64_t step = 0; step < 3; ++step) {
    CAPTURE(step, checkpointed, has_unused, options.static_graph, options.arena, options.bucket_cap_mb);
    forget_gradients(*model);
    forget_gradients(*reference);
    const auto expected = expected_gradients(*reference, group.world_size(),
                                             [&](int r) { return reference(input(step, r)).pow(2).mean(); });
    ddp(wanted_input(step, group.rank())).pow(2).mean().backward();
    CHECK(ddp.stats().steps == static_cast<std::uint64_t>(step + 1));
    check_gradients(*model, expected, group);
  }
}

}  // namespace

RANK_TEST("checkpointed layers, at any position, give the gradients of the joined batch", "[ddp][reentrant]", 1, 2, 3) {
  for (DistributedDataParallelOptions options : kMemories) {
    for (const double cap_mb : {0.01, 25.0}) {
      options.bucket_cap_mb = options.first_bucket_cap_mb = cap_mb;
      for (const auto& checkpointed : kCheckpointed) check_steps(group, checkpointed, false, options);
    }
  }
}

RANK_TEST("checkpointed layers of a static graph with an unused parameter", "[ddp][reentrant]", 1, 2, 3) {
  for (const bool arena : {true, false}) {
    for (const double cap_mb : {0.01, 25.0}) {
      for (const auto& checkpointed : kCheckpointed) {
        check_steps(group, checkpointed, true,
                    {.bucket_cap_mb = cap_mb, .first_bucket_cap_mb = cap_mb, .static_graph = true, .arena = arena});
      }
    }
  }
}

RANK_TEST("DistributedDataParallel as a whole within a checkpoint", "[ddp][reentrant]", 1, 2, 3) {
  for (const bool static_graph : {false, true}) {
    Chain model(std::vector<bool>{false, false}), reference(std::vector<bool>{false, false});
    model->unused.requires_grad_(static_graph);
    DistributedDataParallel ddp(model, group, {.static_graph = static_graph});
    for (std::int64_t step = 0; step < 3; ++step) {
      CAPTURE(static_graph, step);
      forget_gradients(*model);
      forget_gradients(*reference);
      const auto expected = expected_gradients(*reference, group.world_size(),
                                               [&](int r) { return reference(input(step, r)).pow(2).mean(); });
      const Part part = [&](const torch::Tensor& x) { return ddp(x); };
      Checkpoint::apply(wanted_input(step, group.rank()), part).pow(2).mean().backward();
      CHECK(ddp.stats().steps == static_cast<std::uint64_t>(step + 1));
      check_gradients(*model, expected, group);
    }
  }
}

RANK_TEST("a parameter without a gradient is named where all layers are checkpointed, too", "[ddp][reentrant]", 1, 2,
          3) {
  for (const bool known : {false, true}) {
    CAPTURE(known);
    const ddpkit::ProcessGroup own = another_group(group, known ? "reentrant known" : "reentrant");
    Chain model(std::vector<bool>{true, true});
    model->unused.requires_grad_(true);
    model->uses_all = known;
    DistributedDataParallel ddp(model, own);
    const auto step = [&] { ddp(wanted_input(0, own.rank())).sum().backward(); };
    if (known) step();
    model->uses_all = false;
    CHECK_THROWS_WITH(step(), ContainsSubstring("gave no gradient to 1 of 5 parameters: unused"));
    CHECK(ddp.stats().steps == (known ? 1U : 0U));
    group.barrier();
  }
}

RANK_TEST("a backward with others within it that fails leaves nothing behind", "[ddp][reentrant]", 1, 2, 3) {
  Chain model(std::vector<bool>{true, true, true}), reference(std::vector<bool>{false, false, false});
  DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.01});
  for (std::int64_t step = 0; step < 4; ++step) {
    CAPTURE(step);
    if (step > 0) {
      model->fails = true;
      CHECK_THROWS_WITH(ddp(wanted_input(step, group.rank())).sum().backward(),
                        ContainsSubstring("a layer that fails"));
      model->fails = false;
    }
    forget_gradients(*model);
    forget_gradients(*reference);
    const auto expected = expected_gradients(*reference, group.world_size(),
                                             [&](int r) { return reference(input(step, r)).pow(2).mean(); });
    ddp(wanted_input(step, group.rank())).pow(2).mean().backward();
    check_gradients(*model, expected, group);
  }
}

namespace {

/// A block that is used several times, as a whole or only its weight outside of a checkpoint, and a later layer.
struct SharedImpl : torch::nn::Module {
  SharedImpl() {
    torch::manual_seed(8);
    block = register_module("block", torch::nn::Linear(kWidth, kWidth));
    last = register_module("last", torch::nn::Linear(kWidth, kWidth));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x, const std::string& uses, bool checkpoints = true) {
    torch::Tensor y = x;
    const Part part = [this](const torch::Tensor& z) { return torch::tanh(block(z)); };
    for (const char use : uses) {
      if (use == 'c') y = checkpoints ? Checkpoint::apply(y, part) : part(y);
      if (use == 'w') y = torch::tanh(torch::linear(y, block->weight));
    }
    return last(y);
  }
  torch::nn::Linear block{nullptr}, last{nullptr};
};
TORCH_MODULE(Shared);

torch::Tensor loss_of(Shared& model, DistributedDataParallel<SharedImpl>* ddp, const std::string& uses,
                      std::int64_t step, int rank) {
  // A bar separates forwards.
  torch::Tensor loss = torch::zeros({}, torch::kDouble);
  for (std::size_t begin = 0, forward = 0; begin <= uses.size(); ++forward) {
    const std::size_t end = std::min(uses.find('|', begin), uses.size());
    const std::string part = uses.substr(begin, end - begin);
    const torch::Tensor x = wanted_input(10 * step + static_cast<std::int64_t>(forward), rank);
    loss = loss + (ddp ? (*ddp)(x, part) : model(x, part, false)).pow(2).mean();
    begin = end + 1;
  }
  return loss;
}

const std::vector<std::string> kSharedUses = {"cc", "ccc", "cw", "wc", "wcw", "c|c", "cc|c"};

}  // namespace

RANK_TEST("static_graph counts the gradients of parameters that several checkpoints share", "[ddp][reentrant]", 1, 2,
          3) {
  for (DistributedDataParallelOptions options : kMemories) {
    options.static_graph = true;
    for (const double cap_mb : {0.01, 25.0}) {
      options.bucket_cap_mb = options.first_bucket_cap_mb = cap_mb;
      for (const std::string& uses : kSharedUses) {
        Shared model, reference;
        DistributedDataParallel ddp(model, group, options);
        for (std::int64_t step = 0; step < 3; ++step) {
          CAPTURE(uses, step, cap_mb, options.arena, options.gradient_as_bucket_view);
          if (step != 1) forget_gradients(*model);  // In step 1, gradients accumulate.
          if (step != 1) forget_gradients(*reference);
          const auto expected = expected_gradients(*reference, group.world_size(),
                                                   [&](int r) { return loss_of(reference, nullptr, uses, step, r); });
          loss_of(model, &ddp, uses, step, group.rank()).backward();
          CHECK(ddp.stats().steps == static_cast<std::uint64_t>(step + 1));
          check_gradients(*model, expected, group);
        }
      }
    }
  }
}

RANK_TEST("without static_graph, checkpoints that share a parameter are an error that names it", "[ddp][reentrant]", 1,
          2, 3) {
  for (const std::string& uses : kSharedUses) {
    CAPTURE(uses);
    const ddpkit::ProcessGroup own = another_group(group, uses);
    Shared model;
    DistributedDataParallel ddp(model, own);
    CHECK_THROWS_WITH(loss_of(model, &ddp, uses, 0, own.rank()).backward(),
                      ContainsSubstring("parameter block.") && ContainsSubstring("marked ready twice") &&
                          ContainsSubstring("static_graph"));
    group.barrier();
  }
}

RANK_TEST("static_graph: more or fewer gradients than in the first backward are an error that names the parameter",
          "[ddp][reentrant]", 2) {
  for (const auto& [first, second, message] : std::vector<std::tuple<std::string, std::string, std::string>>{
           {"c", "cc", "marked ready twice"}, {"cc", "ccc", "marked ready twice"}, {"cc", "c", "gave no gradient"}}) {
    CAPTURE(first, second);
    const ddpkit::ProcessGroup own = another_group(group, first + " then " + second);
    Shared model;
    DistributedDataParallel ddp(model, own, {.static_graph = true});
    loss_of(model, &ddp, first, 0, own.rank()).backward();
    CHECK_THROWS_WITH(loss_of(model, &ddp, second, 1, own.rank()).backward(),
                      ContainsSubstring("block.") && ContainsSubstring(message));
    group.barrier();
  }
}

namespace {

struct Hidden {
  torch::Tensor value;
};

/// DDP cannot find the tensors of its output.
struct OpaqueImpl : ChainImpl {
  using ChainImpl::ChainImpl;
  Hidden forward(const torch::Tensor& x) { return {ChainImpl::forward(x)}; }
};

}  // namespace

RANK_TEST("checkpointed layers whose output has a custom type", "[ddp][reentrant]", 1, 2, 3) {
  for (const bool static_graph : {false, true}) {
    for (const auto& checkpointed : kCheckpointed) {
      const auto model = std::make_shared<OpaqueImpl>(checkpointed);
      Chain reference(std::vector<bool>(checkpointed.size(), false));
      model->unused.requires_grad_(static_graph);
      reference->unused.requires_grad_(static_graph);
      DistributedDataParallel ddp(model, group, {.static_graph = static_graph});
      for (std::int64_t step = 0; step < 3; ++step) {
        CAPTURE(checkpointed, static_graph, step);
        forget_gradients(*model);
        forget_gradients(*reference);
        const auto expected = expected_gradients(*reference, group.world_size(),
                                                 [&](int r) { return reference(input(step, r)).pow(2).mean(); });
        ddp(wanted_input(step, group.rank())).value.pow(2).mean().backward();
        CHECK(ddp.stats().steps == static_cast<std::uint64_t>(step + 1));
        check_gradients(*model, expected, group);
      }
    }
  }
}

RANK_TEST("DistributedDataParallel as a whole within several checkpoints", "[ddp][reentrant]", 1, 2, 3) {
  Chain model(std::vector<bool>{false, true}), reference(std::vector<bool>{false, false});
  DistributedDataParallel ddp(model, group);
  for (std::int64_t step = 0; step < 3; ++step) {
    CAPTURE(step);
    forget_gradients(*model);
    forget_gradients(*reference);
    const auto expected = expected_gradients(*reference, group.world_size(),
                                             [&](int r) { return reference(reference(input(step, r))).pow(2).mean(); });
    const Part part = [&](const torch::Tensor& x) { return ddp(x); };
    Checkpoint::apply(Checkpoint::apply(wanted_input(step, group.rank()), part), part).pow(2).mean().backward();
    check_gradients(*model, expected, group);
  }
}

RANK_TEST("a backward that threw can be repeated without another forward", "[ddp][reentrant]", 1, 2, 3) {
  for (const bool checkpointed : {false, true}) {
    CAPTURE(checkpointed);
    Chain model(std::vector<bool>{checkpointed, checkpointed, false}), reference(std::vector<bool>(3, false));
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.01});
    const torch::Tensor x = wanted_input(0, group.rank());
    bool fails = true;
    const torch::Tensor scaled = x * 1;
    scaled.register_hook([&](const torch::Tensor&) {
      if (fails) throw std::runtime_error("a hook that fails");
    });
    const torch::Tensor loss = ddp(scaled).pow(2).mean();
    // By then, all of the model's gradients have arrived.
    CHECK_THROWS_WITH(loss.backward({}, /*retain_graph=*/true), ContainsSubstring("a hook that fails"));
    fails = false;
    forget_gradients(*model);
    loss.backward();
    const auto expected =
        expected_gradients(*reference, group.world_size(), [&](int r) { return reference(input(0, r)).pow(2).mean(); });
    check_gradients(*model, expected, group);
  }
}

RANK_TEST("gradients are averaged when a backward returns that another model's backward has called", "[ddp][reentrant]",
          2) {
  for (const bool checkpointed : {false, true}) {
    Chain model(std::vector<bool>{false, checkpointed}), reference(std::vector<bool>{false, false});
    DistributedDataParallel ddp(model, group);
    const auto expected =
        expected_gradients(*reference, group.world_size(), [&](int r) { return reference(input(0, r)).pow(2).mean(); });
    const torch::Tensor loss = ddp(input(0, group.rank())).pow(2).mean();
    const torch::Tensor other = torch::ones({1}).requires_grad_() * 2;
    bool called = false;
    other.register_hook([&](const torch::Tensor&) {
      loss.backward();
      called = true;
      check_gradients(*model, expected, group);
    });
    other.sum().backward();
    CHECK(called);
  }
}
