// A backward within a backward, as reentrant checkpointing has it: parts of the model are run anew in backward, by a
// backward of their own.
#include <torch/torch.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include <ddpkit/comm/error.h>
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

/// Layers one after the other, of which those that are told are run anew in backward.
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
  bool uses_all = false;  ///< The parameter `unused`, too.
  bool fails = false;     ///< The first layer, where backward runs it anew.
  torch::nn::ModuleList layers;
  torch::Tensor unused;
};
TORCH_MODULE(Chain);

// Backward begins with the last layer.
const std::vector<std::vector<bool>> kCheckpointed = {{false, false, true}, {false, true, true},  {true, true, true},
                                                      {true, false, true},  {true, false, false}, {false, true, false}};

/// A checkpoint has a backward only where its input has one.
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
    CHECK(ddp.reducer().backwards() == static_cast<std::uint64_t>(step + 1));
    check_gradients(*model, expected, group);
  }
}

}  // namespace

RANK_TEST("checkpointed layers, wherever they stand, give the gradients of the joined batch", "[ddp][reentrant]", 1, 2,
          3) {
  for (DistributedDataParallelOptions options : kMemories) {
    for (const double cap_mb : {0.01, 25.0}) {
      options.bucket_cap_mb = options.first_bucket_cap_mb = cap_mb;
      for (const auto& checkpointed : kCheckpointed) check_steps(group, checkpointed, false, options);
    }
  }
}

RANK_TEST("checkpointed layers of a static graph that leaves out a parameter", "[ddp][reentrant]", 1, 2, 3) {
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
      CHECK(ddp.reducer().backwards() == static_cast<std::uint64_t>(step + 1));
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
    // In the first backward that has others within itself nothing tells its end: the next forward says it.
    step();
    if (known) model->uses_all = false;
    CHECK_THROWS_WITH(step(), ContainsSubstring("gave no gradient to 1 of 5 parameters: unused"));
    CHECK(ddp.reducer().backwards() == (known ? 1U : 0U));
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
