#include "clstm_ppo/learner.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include <ddpkit/optim/clip_grad_norm.h>
#include <ddpkit/train/metrics.h>

namespace clstm_ppo {
namespace {

// Reshapes [episodes, steps, ...] to [episodes * sequences, sequence, ...].
at::Tensor cut(const at::Tensor& all, std::int64_t sequence) {
  return all.unflatten(1, {all.size(1) / sequence, sequence}).flatten(0, 1);
}

// Returns the memory before each sequence: [1, episodes * sequences, hidden].
at::Tensor memory_of(const std::vector<Memory>& memory, at::Tensor Memory::*part) {
  std::vector<at::Tensor> parts;
  for (const Memory& one : memory) parts.push_back((one.*part).squeeze(0));
  return torch::stack(parts, 1).flatten(0, 1).unsqueeze(0);
}

}  // namespace

// A rollout, divided into sequences. The windows overlap and remain a view; only the windows of one minibatch are
// copied at a time.
struct Learner::Sequences {
  Sequences(const Rollout& rollout, std::int64_t length, const at::Tensor& all_advantages,
            const at::Tensor& all_targets)
      : sequence(length),
        a_row(rollout.actions.size(1) / length),
        windows(rollout.windows.narrow(1, 0, rollout.actions.size(1)).unflatten(1, {a_row, length})),
        actions(cut(rollout.actions, length)),
        log_probability(cut(rollout.log_probability, length)),
        advantages(cut(all_advantages, length)),
        targets(cut(all_targets, length)),
        memory{memory_of(rollout.memory, &Memory::actor_h), memory_of(rollout.memory, &Memory::actor_c),
               memory_of(rollout.memory, &Memory::critic_h), memory_of(rollout.memory, &Memory::critic_c)} {}

  std::int64_t count() const { return actions.size(0); }

  std::int64_t sequence, a_row;
  at::Tensor windows;  // [episodes, sequences, sequence, window, state_size]
  at::Tensor actions, log_probability, advantages, targets;
  Memory memory;
};

Learner::Learner(const TrainOptions& options, std::shared_ptr<CascadedLSTM> model, ddpkit::train::Run& run,
                 const ddpkit::ProcessGroup& group)
    : options_(options),
      group_(group),
      run_(run),
      model_(std::move(model)),
      ddp_(model_, group),
      optimizer_(model_->parameters(), torch::optim::AdamOptions(options.run.lr).eps(1e-5)),
      batch_(options.run.batch_size / options.sequence),
      batches_((std::int64_t{options.envs} * (options.episode_steps / options.sequence) + batch_ - 1) / batch_),
      updates_((batches_ + options.run.grad_accum_steps - 1) / options.run.grad_accum_steps) {}

PpoLoss Learner::loss_of(const Sequences& sequences, const at::Tensor& which) {
  const auto pick = [&](const at::Tensor& all) { return all.index_select(0, which); };
  const auto pick_memory = [&](const at::Tensor& all) { return all.index_select(1, which); };
  const at::Tensor windows =
      sequences.windows.index({which.div(sequences.a_row, "floor"), which.remainder(sequences.a_row)});
  const Memory memory{pick_memory(sequences.memory.actor_h), pick_memory(sequences.memory.actor_c),
                      pick_memory(sequences.memory.critic_h), pick_memory(sequences.memory.critic_c)};
  const ddpkit::optim::Autocast autocast = run_.autocast(group_.device());
  const auto [mean, value, log_std, after] = ddp_(windows, memory);
  const at::Tensor log_probability = clstm_ppo::log_probability(pick(sequences.actions), mean.to(at::kFloat), log_std);
  return ppo_loss({.log_probability = log_probability,
                   .old_log_probability = pick(sequences.log_probability),
                   .advantage = pick(sequences.advantages),
                   .value = value.to(at::kFloat),
                   .target = pick(sequences.targets),
                   .log_std = log_std},
                  options_.ppo);
}

UpdateMetrics Learner::learn(const Rollout& rollout, at::Generator random, ddpkit::train::Epoch& round,
                             const std::function<void()>& after_step) {
  const at::Tensor advantages = advantages_of(rollout.rewards * options_.reward_scale, rollout.values,
                                              options_.ppo.gamma, options_.ppo.gae_lambda);
  const at::Tensor targets = advantages + rollout.values.narrow(1, 0, advantages.size(1));
  const Sequences sequences(rollout, options_.sequence, normalised_over_ranks(advantages, group_), targets);
  at::Tensor sums = torch::zeros({5}, torch::TensorOptions(group_.device()).dtype(torch::kDouble));
  std::int64_t updates = 0;
  bool continues = true;
  for (int pass = 0; pass < options_.ppo_epochs && continues; ++pass) {
    const at::Tensor order = torch::randperm(sequences.count(), random, torch::kLong).to(group_.device());
    const std::vector<at::Tensor> batches = order.split(batch_);
    for (std::size_t first = 0; first < batches.size();
         first += static_cast<std::size_t>(options_.run.grad_accum_steps)) {
      continues = round.next();
      if (!continues) break;
      const std::size_t end = std::min(batches.size(), first + static_cast<std::size_t>(options_.run.grad_accum_steps));
      std::int64_t count = 0;
      for (std::size_t i = first; i < end; ++i) count += batches[i].numel();
      optimizer_.zero_grad();
      for (std::size_t i = first; i < end; ++i) {
        std::optional<ddpkit::Reducer::NoSync> no_sync;
        if (i + 1 < end) no_sync.emplace(ddp_.no_sync());
        // Each sequence has the same weight, also in the last batch of a pass, which may be smaller.
        const double share = static_cast<double>(batches[i].numel()) / static_cast<double>(count);
        const PpoLoss loss = loss_of(sequences, batches[i]);
        run_.scaler().scale(loss.total * share).backward();
        sums += share * torch::stack({loss.policy, loss.value, loss.entropy, loss.kl, loss.clipped}).detach();
      }
      run_.scaler().unscale_(optimizer_);
      ddpkit::optim::clip_grad_norm_(model_->parameters(), options_.ppo.max_grad_norm);
      run_.step_optimizer();
      ++updates;
      round.advance();
      if (after_step) after_step();
    }
  }
  sums = sums.to(torch::kCPU) / static_cast<double>(updates * group_.world_size());
  const std::vector<double> means = ddpkit::train::sum_over_ranks(
      std::vector<double>(sums.const_data_ptr<double>(), sums.const_data_ptr<double>() + sums.numel()), group_);
  return {.policy_loss = means[0], .value_loss = means[1], .entropy = means[2], .kl = means[3], .clip_share = means[4]};
}

}  // namespace clstm_ppo
