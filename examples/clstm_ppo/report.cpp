#include "clstm_ppo/report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <ddpkit/train/svg.h>

namespace clstm_ppo {
namespace {

struct Curve {
  const char* name;
  const std::vector<double>* values;
};

std::vector<Curve> curves_of(const TestResult& test) {
  std::vector<Curve> curves = {{"policy", &test.policy}, {"buy and hold", &test.waiting}};
  if (!test.best.empty()) curves.push_back({"best with the pattern", &test.best});
  return curves;
}

}  // namespace

std::optional<double> TestResult::share_of_best() const {
  if (best.empty()) return std::nullopt;
  return policy_performance().total_return / performance_of(best, periods_per_year).total_return;
}

nlohmann::ordered_json as_json(const Round& round) {
  nlohmann::ordered_json json = {{"round", round.round},
                                 {"rounds", round.rounds},
                                 {"episodes", round.episodes},
                                 {"mean_return", round.episode.total_return},
                                 {"mean_sharpe", round.episode.sharpe},
                                 {"mean_max_drawdown", round.episode.max_drawdown},
                                 {"mean_reward", round.episode.reward},
                                 {"mean_cost", round.episode.cost},
                                 {"policy_loss", round.update.policy_loss},
                                 {"value_loss", round.update.value_loss},
                                 {"entropy", round.update.entropy},
                                 {"kl", round.update.kl},
                                 {"clip_share", round.update.clip_share}};
  if (round.test_return) json["test_return"] = *round.test_return;
  return json;
}

std::string as_line(const Round& round, std::int64_t num_episodes) {
  std::string line = fmt::format(
      "Episodes: {}/{}, Return: {:+.1f}%, Sharpe: {:+.2f}, Drawdown: {:.1f}% | Policy Loss: {:.4f}, Value Loss: {:.4f}",
      round.episodes, num_episodes, 100 * round.episode.total_return, round.episode.sharpe,
      100 * round.episode.max_drawdown, round.update.policy_loss, round.update.value_loss);
  if (round.test_return) line += fmt::format(" | Unseen: {:+.1f}%", 100 * *round.test_return);
  return line;
}

std::vector<std::pair<std::string, double>> scalars_of(const Round& round) {
  std::vector<std::pair<std::string, double>> scalars = {{"return/training", round.episode.total_return},
                                                         {"sharpe/training", round.episode.sharpe},
                                                         {"drawdown/training", round.episode.max_drawdown},
                                                         {"loss/policy", round.update.policy_loss},
                                                         {"loss/value", round.update.value_loss},
                                                         {"policy/entropy", round.update.entropy},
                                                         {"policy/kl", round.update.kl},
                                                         {"policy/clip_share", round.update.clip_share}};
  if (round.test_return) scalars.emplace_back("return/unseen", *round.test_return);
  return scalars;
}

std::string as_json(const TestResult& test) {
  nlohmann::ordered_json json = {{"first_day", test.dates.front()}, {"last_day", test.dates.back()}};
  for (const auto& [name, values] : curves_of(test)) {
    const Performance performance = performance_of(*values, test.periods_per_year);
    std::string key = name;
    std::replace(key.begin(), key.end(), ' ', '_');
    json[key] = {{"return", performance.total_return},
                 {"sharpe", performance.sharpe},
                 {"max_drawdown", performance.max_drawdown}};
  }
  if (const auto share = test.share_of_best()) json["share_of_best"] = *share;
  return nlohmann::ordered_json{{"test", json}}.dump();
}

std::string as_table(const TestResult& test) {
  std::string table = fmt::format("{:<22}  {:>9}  {:>7}  {:>12}", fmt::format("unseen, {} days", test.dates.size()),
                                  "return", "Sharpe", "max drawdown");
  for (const auto& [name, values] : curves_of(test)) {
    const Performance performance = performance_of(*values, test.periods_per_year);
    table += fmt::format("\n{:<22}  {:+7.1f} %  {:+7.2f}  {:>10.1f} %", name, 100 * performance.total_return,
                         performance.sharpe, 100 * performance.max_drawdown);
  }
  if (const auto share = test.share_of_best())
    table += fmt::format("\nthe policy earns {:.1f} % of the best return with the pattern", 100 * *share);
  return table;
}

std::string as_svg(const TestResult& test) {
  namespace svg = ddpkit::train::svg;
  svg::Chart chart{.title = "Value on the unseen days, percent of the first", .series = {}};
  for (const Curve& curve : curves_of(test)) {
    svg::Series series{.name = curve.name, .x = {}, .y = {}};
    for (std::size_t day = 0; day < curve.values->size(); ++day) {
      series.x.push_back(static_cast<double>(day));
      series.y.push_back(100 * (*curve.values)[day] / curve.values->front());
    }
    chart.series.push_back(std::move(series));
  }
  const std::size_t last = test.dates.size() - 1;
  for (std::size_t tick = 0; tick <= 4; ++tick)
    chart.x_ticks.emplace_back(static_cast<double>(last * tick / 4), test.dates[last * tick / 4]);
  return svg::document(720, 420, svg::chart(chart, 0, 0, 720, 420));
}

}  // namespace clstm_ppo
