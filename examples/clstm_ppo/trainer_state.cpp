#include "clstm_ppo/trainer_state.h"

#include <torch/torch.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/train/atomic_file.h>
#include <ddpkit/train/text.h>
#include <ddpkit/train/together.h>

namespace clstm_ppo {

using ddpkit::train::print_line;

void DistributedCLSTMPPOTrainer::State::make_run() {
  options.run.epochs = static_cast<int>(rounds());
  options.run.lr_schedule = options.lr_decay ? "cosine" : "constant";
  run.emplace(options.run, declared, group);
  run->print("Loading data...");
}

void DistributedCLSTMPPOTrainer::State::read_market() {
  const double train_share = 1 - options.test_share;
  const std::int64_t train_days = std::int64_t{options.window} + options.episode_steps;
  const std::size_t least =
      Market::least_days(static_cast<std::size_t>(std::ceil(static_cast<double>(train_days) / train_share)) + 2);
  std::vector<PriceSeries> series = joined(read_price_folder(options.data, options.assets, least), least);
  if (options.shuffle_prices) {
    // Divides the bars at the boundary of the periods, so that no period gets days of the other.
    const auto bars = static_cast<double>(series.front().size()), skipped = static_cast<double>(Market::least_days(0));
    series = shuffled(series, (skipped + std::floor((bars - skipped) * train_share)) / bars, options.run.seed);
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
  const std::string_view device = group.device().is_cpu() ? "rank" : "GPU";
  run->print(fmt::format("{}: {} days of training to {}, {} unseen days to {}{}", fmt::join(market->names(), ", "),
                         training.days(), market->date(training.last - 1), test.days(), market->date(test.last - 1),
                         options.shuffle_prices ? "; moves shuffled" : ""));
  run->print(fmt::format("Rounds: {} of {} episodes ({} per {} x {} {}{})", rounds(), episodes_a_round(), options.envs,
                         device, group.world_size(), device, group.world_size() == 1 ? "" : "s"));
  run->print_batches(0, 0, "", 0, "days");
  auto model = run->make_model([&] {
    return std::make_shared<CascadedLSTM>(
        ModelOptions{.state_size = state_size, .assets = assets, .hidden = options.hidden, .log_std = options.log_std});
  });
  normalizer.emplace(state_size);
  learner.emplace(options, std::move(model), *run, group);
}

void DistributedCLSTMPPOTrainer::State::start() {
  run->start({.model = learner->model(),
              .optimizer = learner->optimizer(),
              .wrapper = &learner->wrapper(),
              .model_name = "cascaded LSTM",
              .optimizer_name = "adam",
              .epoch_name = "Round",
              .updates_per_epoch = learner->updates_per_round(),
              .resumes_within_epoch = false,
              .state = {ddpkit::train::checkpoint_part("normalizer", *normalizer)},
              .facts_that_may_differ = {}},
             {{"asset_names", market->names()},
              {"days", market->days()},
              {"first_day", market->date(0)},
              {"last_day", market->date(market->days() - 1)}});
}

std::string DistributedCLSTMPPOTrainer::State::plot() const {
  if (!options.plot.empty() || !options.run.save) return options.plot;
  return (std::filesystem::path(options.run.save_dir) / "equity.svg").string();
}

void DistributedCLSTMPPOTrainer::State::check_plot() const {
  ddpkit::train::run_together(group, [&] {
    if (run->is_main() && !plot().empty()) ddpkit::train::AtomicFile probe(plot());
  });
}

void DistributedCLSTMPPOTrainer::State::finish(const TestResult& result) {
  if (run->is_main()) print_line(options.run.json ? as_json(result) : as_table(result));
  ddpkit::train::run_together(group, [&] {
    if (!run->is_main() || plot().empty()) return;
    ddpkit::train::write_text(plot(), as_svg(result));
  });
  run->print_summary(fmt::format("test return {:+.1f} %", 100 * result.policy_performance().total_return));
}

TestResult DistributedCLSTMPPOTrainer::evaluate() const {
  const State& state = *state_;
  const Market& market = *state.market;
  TestResult result{.periods_per_year = market.periods_per_year()};
  const auto days = static_cast<std::int64_t>(state.test.days());
  at::Tensor values = torch::empty({days}, torch::kDouble);
  if (state.run->is_main()) {
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

}  // namespace clstm_ppo
