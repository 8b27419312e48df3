// The trainer on several ranks: values that must be equal on all ranks, and values that must differ.
#include <cstring>

#include <ddpkit/train/together.h>

#include "clstm_ppo/trainer.h"
#include "clstm_ppo_program.h"
#include "support/ranks.h"

using namespace clstm_ppo;
using namespace clstm_ppo::testing;

namespace {

std::string bytes_of(const std::vector<at::Tensor>& tensors) {
  std::string bytes;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor here = tensor.detach().contiguous();
    bytes.append(static_cast<const char*>(here.const_data_ptr()), here.nbytes());
  }
  return bytes;
}

bool is_same_on_all(const ddpkit::ProcessGroup& group, const std::string& bytes) {
  for (const std::string& other : group.all_gather_bytes(bytes))
    if (other != bytes) return false;
  return true;
}

// Each rank needs the market at the same path.
TrainOptions options_for(const ddpkit::ProcessGroup& group) {
  TrainOptions options = quick_options();
  options.data = ddpkit::train::broadcast_bytes(group, options.data);
  return options;
}

}  // namespace

RANK_TEST("clstm_ppo: weights are the same bits on all ranks after every update", "[clstm_ppo]", 1, 2, 3) {
  const TrainOptions options = options_for(group);
  DistributedCLSTMPPOTrainer trainer(options, group);
  trainer.initialize();
  const auto weights = [&] { return bytes_of(trainer.model().parameters()); };
  CHECK(is_same_on_all(group, weights()));
  std::string before = weights();
  int updates = 0;
  trainer.set_update_hook([&] {
    ++updates;
    const std::string now = weights();
    CHECK(now != before);
    CHECK(is_same_on_all(group, now));
    before = now;
  });
  for (int round = 0; round < 3; ++round) {
    const Rollout rollout = trainer.run_episode();
    // Each rank has its own exploration.
    if (group.world_size() > 1) CHECK_FALSE(is_same_on_all(group, bytes_of({rollout.actions.contiguous()})));
    trainer.update(rollout);
    const RunningNormalizer& normalizer = trainer.normalizer();
    CHECK(is_same_on_all(group, bytes_of({normalizer.mean(), normalizer.variance()})));
  }
  // 16 sequences of 8 days make 8 batches of 16 days; 3 batches per update, 2 passes.
  CHECK(updates == 3 * 2 * 3);
  CHECK(trainer.round() == 3);
}

RANK_TEST("clstm_ppo: metrics are the means over the episodes of all ranks", "[clstm_ppo]", 1, 2, 3) {
  const TrainOptions options = options_for(group);
  DistributedCLSTMPPOTrainer trainer(options, group);
  trainer.initialize();
  for (int round = 0; round < 2; ++round) {
    const Rollout rollout = trainer.run_episode();
    const EpisodeMetrics metrics = trainer.gather_metrics(rollout);
    // Each rank's figures, as text, and their mean.
    std::string text;
    for (std::size_t episode = 0; episode < rollout.equity.size(); ++episode) {
      const std::vector<double>& values = rollout.equity[episode];
      text +=
          fmt::format("{:.17g} {:.17g} {:.17g}\n", values.back() / values.front() - 1,
                      rollout.rewards[static_cast<std::int64_t>(episode)].sum().item<double>(), rollout.costs[episode]);
    }
    double count = 0, returns = 0, rewards = 0, costs = 0;
    for (const std::string& of_rank : group.all_gather_bytes(text)) {
      std::istringstream lines(of_rank);
      for (double a, b, c; lines >> a >> b >> c; ++count) {
        returns += a;
        rewards += b;
        costs += c;
      }
    }
    CHECK(count == 8 * group.world_size());
    CHECK(metrics.episodes == 8 * group.world_size());
    CHECK(metrics.total_return == Approx(returns / count).epsilon(1e-12));
    CHECK(metrics.reward == Approx(rewards / count).epsilon(1e-12));
    CHECK(metrics.cost == Approx(costs / count).epsilon(1e-12));
    CHECK(metrics.max_drawdown > 0);
    const auto text_of = [&] { return fmt::format("{:.17g} {:.17g}", metrics.sharpe, metrics.max_drawdown); };
    CHECK(is_same_on_all(group, text_of()));
    trainer.update(rollout);
  }
}

RANK_TEST("clstm_ppo: statistics of the states are those of all states of all ranks", "[clstm_ppo]", 1, 2, 3) {
  RunningNormalizer normalizer(4);
  std::vector<at::Tensor> seen;
  for (int round = 0; round < 3; ++round) {
    // Each rank has another number of states, far from 0.
    torch::manual_seed(10 * round + group.rank());
    const at::Tensor mine = 1000 + 3 * torch::randn({5 + 2 * group.rank(), 2, 4});
    normalizer.update(mine, group);
    for (int rank = 0; rank < group.world_size(); ++rank) {
      torch::manual_seed(10 * round + rank);
      seen.push_back(1000 + 3 * torch::randn({5 + 2 * rank, 2, 4}));
      seen.back() = seen.back().flatten(0, 1);
    }
  }
  const at::Tensor all = torch::cat(seen).to(torch::kDouble);
  CHECK(normalizer.count() == static_cast<double>(all.size(0)));
  CHECK(torch::allclose(normalizer.mean(), all.mean(0), 1e-12));
  CHECK(torch::allclose(normalizer.variance(), all.var(0, /*unbiased=*/false), 1e-9));
  CHECK(is_same_on_all(group, bytes_of({normalizer.mean(), normalizer.variance()})));
}

RANK_TEST("clstm_ppo: advantages are normalised over all ranks", "[clstm_ppo]", 2, 3) {
  const at::Tensor mine = torch::arange(6, torch::kFloat).reshape({2, 3}) + 10 * group.rank();
  const at::Tensor all = group.all_gather(mine);
  const at::Tensor expected = (mine - all.mean()) / all.std(/*unbiased=*/false);
  CHECK(torch::allclose(clstm_ppo::normalised_over_ranks(mine, group), expected, 1e-5, 1e-6));
}
