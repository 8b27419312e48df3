// A sharded optimizer after the loss of a rank, which has a part of the state.
#include <signal.h>
#include <sys/mman.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include <ddpkit/ddpkit.h>

#include "optim/shards.h"
#include "optim/state_tensors.h"
#include "ranks/elastic_loss.h"
#include "ranks/elastic_run.h"
#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"
#include "tensor/parallel_for.h"

namespace {

using ddpkit::ProcessGroup;
using ddpkit::optim::FusedAdam;
using ddpkit::optim::FusedSGD;
using ddpkit::optim::ShardedOptimizer;
using ddpkit::testing::die;
using ddpkit::testing::elastic_group;
using ddpkit::testing::Folder;
using ddpkit::testing::on_ranks;
using ddpkit::testing::read_file;
using torch::optim::AdamOptions;
using torch::optim::SGDOptions;

constexpr int kGroupSize = 4;
constexpr int kLostRank = 1;
constexpr int kUpdates = 6;
constexpr int kRows = 64;
constexpr int kInputs = 96, kOutputs = 1024;  ///< Each rank has several blocks of the weight's state.

/// How rank kLostRank ends in a step.
struct Ending {
  int step = -1;          ///< -1: never.
  bool in_update = true;  ///< Otherwise before the step.
};

/// Ends this process within the second block of the largest piece: `in_state`: when the update has changed a part of
/// the state. Otherwise, or without a state: before it has changed the state.
void die_in_update(const ddpkit::optim::ShardedOptimizerBase& optimizer, bool in_state) {
  const ddpkit::optim::Shards& shards = ddpkit::optim::Shards::of(optimizer);
  at::Tensor piece = *std::ranges::max_element(shards.pieces, {}, [](const at::Tensor& each) { return each.numel(); });
  const auto found = shards.inner->state().find(piece.unsafeGetTensorImpl());
  if (in_state && found != shards.inner->state().end()) {
    const auto& algorithm = ddpkit::optim::FusedOptimizer::Impl::of(*shards.inner).algorithm();
    piece = algorithm.tensors_of(*found->second)[0];
  }
  constexpr std::int64_t kElement = ddpkit::optim::kBlockElements + 3000;
  REQUIRE(piece.numel() > kElement);
  const auto page = static_cast<std::uintptr_t>(::getpagesize());
  const auto address = reinterpret_cast<std::uintptr_t>(piece.narrow(0, kElement, 1).data_ptr());
  ::signal(SIGSEGV, [](int) { die(); });
  REQUIRE(::mprotect(reinterpret_cast<void*>(address / page * page), page, PROT_READ) == 0);
}

template <class Inner, class Options>
struct Recipe {
  Options options;
  at::ScalarType dtype = at::kFloat;
  std::function<void(Options&)> change = [](Options&) {};  ///< Before the second step.
};

template <class Inner, class Options>
std::string train_sharded(const ProcessGroup& group, const Recipe<Inner, Options>& recipe, const Ending& ending = {}) {
  const int first_rank = group.rank();
  torch::manual_seed(5);
  torch::nn::Linear model(kInputs, kOutputs);
  model->to(recipe.dtype);
  const torch::Tensor inputs = torch::randn({kRows, kInputs}).to(recipe.dtype);
  ddpkit::DistributedDataParallel ddp(model, group);
  ShardedOptimizer<Inner> optimizer(ddp, recipe.options, {}, {.master_weights = recipe.dtype != at::kFloat});
  ddpkit::DistributedSampler sampler(kRows, group);
  std::unique_ptr<ddpkit::optim::Elastic> elastic;
  if (ddpkit::optim::Shards::of(optimizer).survives_loss())
    elastic = std::make_unique<ddpkit::optim::Elastic>(ddp, sampler);
  std::int64_t steps = 0;
  bool interrupted = false;
  do {
    interrupted = false;
    sampler.reset();
    while (steps < kUpdates && !interrupted) {
      const auto indices = sampler.next(2);
      REQUIRE(indices);
      const torch::Tensor chosen = torch::tensor(std::vector<std::int64_t>(indices->begin(), indices->end()));
      const bool dies = first_rank == kLostRank && steps == ending.step;
      if (dies && !ending.in_update) die();
      if (steps == 1) recipe.change(static_cast<Options&>(optimizer.param_groups()[0].options()));
      const auto update = [&] {
        model->zero_grad();
        ddp(inputs.index({chosen})).pow(2).mean().backward();
        // The state moves in the second step, if that has other kinds of state.
        if (dies) die_in_update(optimizer, /*in_state=*/steps != 1);
        optimizer.step();
      };
      if (elastic) {
        interrupted = !elastic->step(2, update);
      } else {
        update();
      }
      if (interrupted) continue;
      ++steps;
      const torch::NoGradGuard no_grad;
      model->weight.clamp_(-0.1, 0.09);  // As a program may between two steps.
    }
  } while (interrupted);
  optimizer.consolidate_state();
  std::ostringstream text;
  std::vector<torch::Tensor> values = model->parameters();
  if (group.rank() == 0) {
    auto& whole = const_cast<ddpkit::optim::FusedOptimizer&>(optimizer.consolidated());
    const auto state = ddpkit::optim::state_tensors(whole);
    CHECK(!state.empty());
    values.insert(values.end(), state.begin(), state.end());
  }
  ddpkit::testing::write_bytes(text, values);
  return text.str();
}

template <class Inner, class Options>
void compare_torn(const char* name, const Recipe<Inner, Options>& recipe) {
  for (const int step : {0, 1, 3}) {
    const Folder torn, left;
    const auto run = [&](const Folder& folder, bool in_update) {
      on_ranks(name, kGroupSize,
               [&](ProcessGroup& outer) {
                 const std::string result = train_sharded(elastic_group(), recipe, {step, in_update});
                 std::ofstream(folder / std::to_string(outer.rank()), std::ios::binary) << result;
               },
               {.doomed = {kLostRank}});
    };
    run(torn, true);
    run(left, false);
    for (const int rank : {0, 2, 3}) {
      INFO("step " << step << ", rank " << rank);
      const std::string expected = read_file(left / std::to_string(rank));
      CHECK(!expected.empty());
      CHECK((read_file(torn / std::to_string(rank)) == expected));
    }
  }
}

const Recipe<FusedAdam, AdamOptions> kAdam{.options = AdamOptions(0.01),
                                           .change = [](AdamOptions& options) { options.amsgrad(true).lr(0.02); }};
const Recipe<FusedSGD, SGDOptions> kSgd{.options = SGDOptions(0.1),
                                        .change = [](SGDOptions& options) { options.momentum(0.9); }};
const Recipe<FusedAdam, AdamOptions> kAdamWithMasters{.options = AdamOptions(0.01), .dtype = at::kBFloat16};

}  // namespace

TEST_CASE("a rank ends within the update of a sharded optimizer", "[ranks][shm][elastic]") {
  const char* name = "a rank ends within the update of a sharded optimizer";
  compare_torn(name, kAdam);
  compare_torn(name, kSgd);
  compare_torn(name, kAdamWithMasters);
}

RANK_TEST("a sharded optimizer of an elastic group has the result of another group", "[elastic]", 1, 3) {
  CHECK((train_sharded(elastic_group(), kAdam) == train_sharded(group, kAdam)));
  CHECK((train_sharded(elastic_group(), kSgd) == train_sharded(group, kSgd)));
  CHECK((train_sharded(elastic_group(), kAdamWithMasters) == train_sharded(group, kAdamWithMasters)));
}

TEST_CASE("a rank that ends before it has loaded the state of a sharded optimizer is an error",
          "[ranks][shm][elastic]") {
  on_ranks("a rank that ends before it has loaded the state of a sharded optimizer is an error", 3,
           [](ProcessGroup&) {
             const ProcessGroup group = elastic_group();
             torch::nn::Linear model(4, 2);
             ddpkit::DistributedDataParallel ddp(model, group);
             ShardedOptimizer<FusedAdam> optimizer(ddp, AdamOptions(0.1));
             ddpkit::DistributedSampler sampler(8, group);
             ddpkit::optim::Elastic elastic(ddp, sampler);
             const auto update = [&] {
               ddp(torch::ones({1, 4})).sum().backward();
               optimizer.step();
             };
             REQUIRE(elastic.step(1, update));
             optimizer.consolidate_state();
             std::stringstream saved;
             if (group.rank() == 0) {
               torch::serialize::OutputArchive archive;
               optimizer.save(archive);
               archive.save_to(saved);
             }
             const std::string bytes = group.all_gather_bytes(saved.str())[0];
             if (group.rank() == kLostRank) die();
             torch::serialize::InputArchive archive;
             archive.load_from(bytes.data(), bytes.size());
             optimizer.load(archive);
             CHECK_THROWS_WITH(elastic.step(1, update),
                               ContainsSubstring("was lost while the state of its sharded optimizer"));
           },
           {.doomed = {kLostRank}});
}

RANK_TEST("Elastic refuses a sharded optimizer that is lost with a rank", "[elastic]", 2) {
  const auto refuses = [](const ProcessGroup& elastic, const torch::nn::Sequential& model,
                          const ddpkit::optim::ShardedOptions& options = {}) {
    ddpkit::DistributedDataParallel ddp(model.ptr(), elastic);
    ShardedOptimizer<FusedAdam> optimizer(ddp, AdamOptions(0.1), options);
    ddpkit::DistributedSampler sampler(8, elastic);
    CHECK_THROWS_WITH(ddpkit::optim::Elastic(ddp, sampler), ContainsSubstring("a ShardedOptimizer continues only"));
  };
  const auto make_model = [] { return torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4)); };
  refuses(elastic_group("gloo"), make_model());
  refuses(elastic_group(), make_model(), {.shared_weights = true});
  const auto model = make_model();
  auto parameters = model->parameters();
  parameters[2].set_data(parameters[0].data());
  refuses(elastic_group(), model);
}
