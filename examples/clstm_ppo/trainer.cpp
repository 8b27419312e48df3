#include "clstm_ppo/trainer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/random.h>
#include <ddpkit/train/together.h>

#include "clstm_ppo/device.h"
#include "clstm_ppo/trainer_state.h"

namespace clstm_ppo {

DistributedCLSTMPPOTrainer::DistributedCLSTMPPOTrainer(const TrainOptions& options, ddpkit::train::Program& program)
    : DistributedCLSTMPPOTrainer(
          options, program.join(options.run, {.device = choose_device(options, ddpkit::read_launch_environment())})) {}

DistributedCLSTMPPOTrainer::DistributedCLSTMPPOTrainer(const TrainOptions& options, const ddpkit::ProcessGroup& group) {
  check_options(options);
  state_ = std::make_unique<State>(options, group);
}

DistributedCLSTMPPOTrainer::~DistributedCLSTMPPOTrainer() = default;

void DistributedCLSTMPPOTrainer::initialize() {
  set_up_device(state_->options, state_->group.device());
  state_->make_run();
  state_->options.data = ddpkit::train::data_folder(
      state_->options.data, "data/planted", [](const std::string& path) { generate(path, {}); }, state_->group);
  ddpkit::train::run_together(state_->group, [&] { state_->read_market(); });
  state_->make_model();
  state_->start();
  state_->check_plot();
}

void DistributedCLSTMPPOTrainer::train() {
  State& state = *state_;
  ddpkit::train::Run& run = *state.run;
  std::optional<TestResult> test;  // Of the current weights.
  while (run.has_epoch() && !run.is_stopped()) {
    const Rollout rollout = run_episode();
    const std::int64_t before = run.epoch();
    Round round{.update = update(rollout)};
    if (run.epoch() == before) break;  // The run reached its last step or was stopped before the end of the round.
    round.episode = gather_metrics(rollout);
    test.reset();
    if (state.options.eval_every > 0 && run.epoch() % state.options.eval_every == 0) {
      test = evaluate();
      round.test_return = test->policy_performance().total_return;
    }
    round.round = run.epoch();
    round.rounds = state.rounds();
    round.episodes = run.epoch() * state.episodes_a_round();
    state.round->report(fmt::format("{} | {:.1f} s, {:.1f} episodes/s", as_line(round, state.options.num_episodes),
                                    state.round->seconds(), state.round->items_per_second()),
                        as_json(round), scalars_of(round));
    save_checkpoint();
  }
  if (run.finish()) state.finish(test ? *test : evaluate());
}

Rollout DistributedCLSTMPPOTrainer::run_episode() {
  State& state = *state_;
  state.round.emplace(*state.run, state.learner->updates_per_round(), state.episodes_a_round(), "episodes");
  const std::uint64_t seed = state.seed(0);
  ddpkit::train::Random random(seed);
  const auto steps = static_cast<std::size_t>(state.options.episode_steps),
             window = static_cast<std::size_t>(state.options.window);
  const std::size_t first = state.training.first + window - 1;  // The window begins with the period.
  std::vector<std::size_t> first_days;
  for (int episode = 0; episode < state.options.envs; ++episode)
    first_days.push_back(
        first + static_cast<std::size_t>(random.below(static_cast<std::int64_t>(state.training.last - steps - first))));
  ddpkit::train::ProgressBar bar = state_->run->bar(state.run->epoch() + 1, "Episodes", state.options.episode_steps);
  return run_episodes(state_->learner->model(), *state.normalizer, *state.market, state.environment, first_days,
                      {.window = state.options.window,
                       .steps = state.options.episode_steps,
                       .sequence = state.options.sequence,
                       .after_step = [&bar] { bar.advance(); }},
                      at::make_generator<at::CPUGeneratorImpl>(seed));
}

UpdateMetrics DistributedCLSTMPPOTrainer::update(const Rollout& rollout) {
  State& state = *state_;
  const UpdateMetrics metrics = state.learner->learn(rollout, at::make_generator<at::CPUGeneratorImpl>(state.seed(1)),
                                                     *state.round, state.update_hook);
  if (state.round->finish(metrics.policy_loss + metrics.value_loss))
    state.normalizer->update(rollout.states, state.group);
  return metrics;
}

EpisodeMetrics DistributedCLSTMPPOTrainer::gather_metrics(const Rollout& rollout) const {
  std::vector<double> sums(6, 0.0);
  for (std::size_t episode = 0; episode < rollout.equity.size(); ++episode) {
    const Performance performance = performance_of(rollout.equity[episode], state_->market->periods_per_year());
    sums[0] += 1;
    sums[1] += performance.total_return;
    sums[2] += performance.sharpe;
    sums[3] += performance.max_drawdown;
    sums[4] += rollout.rewards[static_cast<std::int64_t>(episode)].sum().item<double>();
    sums[5] += rollout.costs[episode];
  }
  sums = ddpkit::train::sum_over_ranks(sums, state_->group);
  return {.episodes = static_cast<std::int64_t>(sums[0]),
          .total_return = sums[1] / sums[0],
          .sharpe = sums[2] / sums[0],
          .max_drawdown = sums[3] / sums[0],
          .reward = sums[4] / sums[0],
          .cost = sums[5] / sums[0]};
}

void DistributedCLSTMPPOTrainer::save_checkpoint() { state_->run->save(); }

void DistributedCLSTMPPOTrainer::set_update_hook(std::function<void()> hook) { state_->update_hook = std::move(hook); }
std::int64_t DistributedCLSTMPPOTrainer::rounds() const { return state_->rounds(); }
std::int64_t DistributedCLSTMPPOTrainer::round() const { return state_->run->epoch(); }
CascadedLSTM& DistributedCLSTMPPOTrainer::model() { return state_->learner->model(); }
const RunningNormalizer& DistributedCLSTMPPOTrainer::normalizer() const { return *state_->normalizer; }

}  // namespace clstm_ppo
