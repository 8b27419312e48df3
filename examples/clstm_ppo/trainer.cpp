#include "clstm_ppo/trainer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/ddpkit.h>
#include <ddpkit/train/atomic_file.h>
#include <ddpkit/train/checkpoint.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/progress.h>
#include <ddpkit/train/random.h>
#include <ddpkit/train/run_folder.h>
#include <ddpkit/train/seed.h>
#include <ddpkit/train/summary_writer.h>
#include <ddpkit/train/text.h>
#include <ddpkit/train/together.h>

#include "clstm_ppo/device.h"
#include "clstm_ppo/learner.h"

namespace clstm_ppo {

using ddpkit::train::print_line;

struct DistributedCLSTMPPOTrainer::State {
  State(const TrainOptions& given, ddpkit::ProcessGroup ranks) : options(given), group(std::move(ranks)) {}

  bool speaks() const { return group.rank() == 0; }
  std::int64_t episodes_a_round() const { return std::int64_t{options.envs} * group.world_size(); }
  std::int64_t rounds() const { return (options.num_episodes + episodes_a_round() - 1) / episodes_a_round(); }
  bool is_out_of_steps() const { return options.trainer.max_steps && info.step >= *options.trainer.max_steps; }

  /// Of the current round, for this rank; `part` 0 explores, 1 shuffles.
  std::uint64_t seed(int part) const {
    return ddpkit::train::epoch_seed(options.trainer.seed, 2 * info.epoch + part, group.rank());
  }

  void read_market();
  void make_model();
  void open_folder();
  void print_header() const;
  std::string config() const;
  std::vector<ddpkit::train::CheckpointPart> parts();
  void report(const Round& round);
  void finish(const TestResult& test) const;

  TrainOptions options;
  ddpkit::ProcessGroup group;
  std::optional<Market> market;
  Period training, test;
  EnvironmentOptions environment;
  std::optional<RunningNormalizer> normalizer;
  std::optional<Learner> learner;
  std::function<void()> update_hook;
  ddpkit::train::RunFolder folder;
  ddpkit::train::CheckpointInfo info;  // Rounds finished (epoch) and updates made (step).
  std::optional<ddpkit::train::SummaryWriter> summary;
};

void DistributedCLSTMPPOTrainer::State::read_market() {
  const double train_share = 1 - options.test_share;
  const std::int64_t train_days = std::int64_t{options.window} + options.episode_steps;
  const std::size_t least =
      Market::least_days(static_cast<std::size_t>(std::ceil(static_cast<double>(train_days) / train_share)) + 2);
  std::vector<PriceSeries> series = joined(read_price_folder(options.data, options.assets, least), least);
  if (options.shuffle_prices) {
    // Divided where the periods are, so that neither gets days of the other.
    const auto bars = static_cast<double>(series.front().size()), skipped = static_cast<double>(Market::least_days(0));
    series = shuffled(series, (skipped + std::floor((bars - skipped) * train_share)) / bars, options.trainer.seed);
  }
  market.emplace(series);
  const auto middle = static_cast<std::size_t>(std::floor(static_cast<double>(market->days()) * train_share));
  training = {0, middle};
  test = {middle, market->days()};
  environment = {.initial_cash = options.initial_cash,
                 .hmax = options.hmax,
                 .cost = options.cost,
                 .turbulence_threshold = market->turbulence_quantile(training, options.turbulence_share)};
}

void DistributedCLSTMPPOTrainer::State::make_model() {
  const auto assets = static_cast<std::int64_t>(market->assets());
  const auto state_size = static_cast<std::int64_t>(TradingEnvironment::state_size(market->assets()));
  torch::manual_seed(options.trainer.seed);
  auto model = std::make_shared<CascadedLSTM>(
      ModelOptions{.state_size = state_size, .assets = assets, .hidden = options.hidden, .log_std = options.log_std});
  model->to(group.device());
  normalizer.emplace(state_size);
  learner.emplace(options, std::move(model), rounds(), group);
}

std::string DistributedCLSTMPPOTrainer::State::config() const {
  return nlohmann::json{
      {"program", "clstm_ppo"},
      {"assets", market->names()},
      {"days", market->days()},
      {"test_share", options.test_share},
      {"shuffle_prices", options.shuffle_prices},
      {"initial_cash", options.initial_cash},
      {"hmax", options.hmax.value_or(0)},
      {"cost", options.cost},
      {"turbulence_share", options.turbulence_share},
      {"num_episodes", options.num_episodes},
      {"envs", options.envs},
      {"episode_steps", options.episode_steps},
      {"window", options.window},
      {"sequence", options.sequence},
      {"batch_size", options.trainer.batch_size},
      {"grad_accum_steps", options.grad_accum_steps},
      {"ppo_epochs", options.ppo_epochs},
      {"lr", options.trainer.lr},
      {"lr_decay", options.lr_decay},
      {"clip", options.ppo.clip},
      {"gamma", options.ppo.gamma},
      {"gae_lambda", options.ppo.gae_lambda},
      {"entropy", options.ppo.entropy},
      {"value", options.ppo.value},
      {"max_grad_norm", options.ppo.max_grad_norm},
      {"reward_scale", options.reward_scale},
      {"hidden", options.hidden},
      {"log_std", options.log_std},
      {"amp", learner->amp_name()},
      {"seed", options.trainer.seed},
      {"world_size", group.world_size()},
  }
      .dump();
}

std::vector<ddpkit::train::CheckpointPart> DistributedCLSTMPPOTrainer::State::parts() {
  auto parts = learner->parts();
  parts.push_back(ddpkit::train::checkpoint_part("normalizer", *normalizer));
  return parts;
}

void DistributedCLSTMPPOTrainer::State::open_folder() {
  const std::filesystem::path path = options.trainer.save_dir;
  folder = ddpkit::train::open_run_folder(
      path, config(),
      {.resume = options.trainer.resume, .overwrite = options.trainer.overwrite, .may_differ = {"num_episodes"}},
      group);
  if (folder.to_resume)
    info = ddpkit::train::load_checkpoint(folder.checkpoint, learner->model(), learner->optimizer(), group, parts());
  ddpkit::train::run_together(group, [&] {
    if (!options.tensorboard || !speaks()) return;
    summary.emplace(path / "tensorboard", folder.to_resume ? info.step + 1 : 0);
    summary->add_text("config", "```\n" + nlohmann::json::parse(config()).dump(2) + "\n```", info.step);
  });
}

void DistributedCLSTMPPOTrainer::State::print_header() const {
  std::int64_t parameters = 0;
  for (const at::Tensor& parameter : learner->model().parameters()) parameters += parameter.numel();
  print_line(fmt::format("{}: {} days of training, {} to {}, then {} unseen to {}{}", fmt::join(market->names(), ", "),
                         training.days(), market->date(training.first), market->date(training.last - 1), test.days(),
                         market->date(test.last - 1), options.shuffle_prices ? "; moves shuffled" : ""));
  print_line(
      fmt::format("cascaded LSTM with {} parameters, windows of {} days, {} episodes of {} days on each of {} rank{} "
                  "({}, {}), batch "
                  "{} x {}, mixed precision {}",
                  parameters, options.window, options.envs, options.episode_steps, group.world_size(),
                  group.world_size() == 1 ? "" : "s", group.backend_name(), group.device().str(),
                  options.trainer.batch_size, options.grad_accum_steps, learner->amp_name()));
  if (folder.to_resume) print_line(fmt::format("resumed from {}, round {}", folder.checkpoint.string(), info.epoch));
}

void DistributedCLSTMPPOTrainer::State::report(const Round& round) {
  if (!speaks()) return;
  print_line(options.trainer.json ? as_json(round) : as_line(round));
  if (summary) write_to(*summary, round);
}

void DistributedCLSTMPPOTrainer::State::finish(const TestResult& result) const {
  std::string plot = options.plot;
  if (plot.empty() && !options.trainer.save_dir.empty())
    plot = (std::filesystem::path(options.trainer.save_dir) / "equity.svg").string();
  ddpkit::train::run_together(group, [&] {
    if (!speaks() || plot.empty()) return;
    const std::string text = as_svg(result);
    ddpkit::train::AtomicFile file(plot);
    file.write(text.data(), text.size());
    file.commit();
  });
  if (!speaks()) return;
  print_line(options.trainer.json ? as_json(result) : as_table(result));
  print_line(fmt::format("test return {:+.1f} %", 100 * result.policy_performance().total_return));
}

DistributedCLSTMPPOTrainer::DistributedCLSTMPPOTrainer(const TrainOptions& options, ddpkit::train::Program& program)
    : DistributedCLSTMPPOTrainer(
          options, program.init_process_group({.backend = options.trainer.backend,
                                               .device = choose_device(options, ddpkit::read_launch_environment())})) {}

DistributedCLSTMPPOTrainer::DistributedCLSTMPPOTrainer(const TrainOptions& options, const ddpkit::ProcessGroup& group) {
  check_options(options);
  state_ = std::make_unique<State>(options, group);
}

DistributedCLSTMPPOTrainer::~DistributedCLSTMPPOTrainer() = default;

void DistributedCLSTMPPOTrainer::initialize() {
  set_up_device(state_->options, state_->group.device());
  ddpkit::train::run_together(state_->group, [&] { state_->read_market(); });
  state_->make_model();
  if (!state_->options.trainer.save_dir.empty()) state_->open_folder();
}

void DistributedCLSTMPPOTrainer::train() {
  State& state = *state_;
  if (state.speaks() && !state.options.trainer.json) state.print_header();
  std::optional<TestResult> test;  // Of the weights as they are now.
  while (state.info.epoch < state.rounds() && !state.is_out_of_steps()) {
    const auto start = std::chrono::steady_clock::now();
    Round round{.rounds = state.rounds(), .world_size = state.group.world_size(), .lr = state.learner->lr()};
    const Rollout rollout = run_episode();
    const std::int64_t before = state.info.epoch;
    round.update = update(rollout);
    if (state.info.epoch == before) break;  // Out of steps before the round's end.
    round.episode = gather_metrics(rollout);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    test.reset();
    if (state.options.evaluate_every > 0 && state.info.epoch % state.options.evaluate_every == 0) {
      test = evaluate();
      round.test_return = test->policy_performance().total_return;
    }
    round.seconds = elapsed.count();
    round.round = state.info.epoch;
    round.episodes = state.info.epoch * state.episodes_a_round();
    round.step = state.info.step;
    state.report(round);
    save_checkpoint();
  }
  state.finish(test ? *test : evaluate());
}

Rollout DistributedCLSTMPPOTrainer::run_episode() {
  const State& state = *state_;
  const std::uint64_t seed = state.seed(0);
  ddpkit::train::Random random(seed);
  const auto steps = static_cast<std::size_t>(state.options.episode_steps),
             window = static_cast<std::size_t>(state.options.window);
  const std::size_t first = state.training.first + window - 1;  // Its window begins with the period.
  std::vector<std::size_t> first_days;
  for (int episode = 0; episode < state.options.envs; ++episode)
    first_days.push_back(
        first + static_cast<std::size_t>(random.below(static_cast<std::int64_t>(state.training.last - steps - first))));
  return run_episodes(
      state_->learner->model(), *state.normalizer, *state.market, state.environment, first_days,
      {.window = state.options.window, .steps = state.options.episode_steps, .sequence = state.options.sequence},
      at::make_generator<at::CPUGeneratorImpl>(seed));
}

UpdateMetrics DistributedCLSTMPPOTrainer::update(const Rollout& rollout) {
  State& state = *state_;
  const auto after_step = [&] {
    ++state.info.step;
    if (state.update_hook) state.update_hook();
    return !state.is_out_of_steps();
  };
  const Learner::Result result =
      state.learner->learn(rollout, at::make_generator<at::CPUGeneratorImpl>(state.seed(1)), after_step);
  if (!std::isfinite(result.metrics.policy_loss + result.metrics.value_loss))
    throw ddpkit::Error(fmt::format("the loss became {} in round {}: lower --lr ({})",
                                    result.metrics.policy_loss + result.metrics.value_loss, state.info.epoch + 1,
                                    state.options.trainer.lr),
                        {.rank = 0});
  if (!result.is_complete) return result.metrics;
  state.normalizer->update(rollout.states, state.group);
  ++state.info.epoch;
  return result.metrics;
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

void DistributedCLSTMPPOTrainer::save_checkpoint() {
  State& state = *state_;
  if (state.folder.checkpoint.empty()) return;
  state.info.config = state.config();
  ddpkit::train::save_checkpoint(state.folder.checkpoint, state.learner->model(), state.learner->optimizer(),
                                 state.info, state.group, state.parts());
}

TestResult DistributedCLSTMPPOTrainer::evaluate() const {
  const State& state = *state_;
  const Market& market = *state.market;
  TestResult result{.periods_per_year = market.periods_per_year()};
  const auto days = static_cast<std::int64_t>(state.test.days());
  at::Tensor values = torch::empty({days}, torch::kDouble);
  if (state.speaks()) {
    const Rollout rollout =
        run_episodes(state_->learner->model(), *state.normalizer, market, state.environment, {state.test.first},
                     {.window = state.options.window, .steps = days - 1, .sequence = days}, {});
    values.copy_(torch::tensor(rollout.equity.front(), torch::kDouble));
  }
  values = values.to(state.group.device());
  state.group.broadcast(values);
  values = values.to(torch::kCPU);
  result.policy.assign(values.const_data_ptr<double>(), values.const_data_ptr<double>() + days);
  for (std::size_t day = state.test.first; day < state.test.last; ++day) result.dates.push_back(market.date(day));
  result.waiting = buy_and_hold(market, state.test, state.options.initial_cash, state.options.cost);
  if (market.has_pattern())
    result.best = best_with_pattern(market, state.test, state.options.initial_cash, state.options.cost);
  return result;
}

void DistributedCLSTMPPOTrainer::set_update_hook(std::function<void()> hook) { state_->update_hook = std::move(hook); }
std::int64_t DistributedCLSTMPPOTrainer::rounds() const { return state_->rounds(); }
std::int64_t DistributedCLSTMPPOTrainer::round() const { return state_->info.epoch; }
CascadedLSTM& DistributedCLSTMPPOTrainer::model() { return state_->learner->model(); }
const RunningNormalizer& DistributedCLSTMPPOTrainer::normalizer() const { return *state_->normalizer; }

}  // namespace clstm_ppo
