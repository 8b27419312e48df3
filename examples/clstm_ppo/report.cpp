#include "clstm_ppo/report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <ddpkit/train/summary_writer.h>
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

std::string as_json(const Round& round) {
  nlohmann::ordered_json json = {{"round", round.round},
                                 {"rounds", round.rounds},
                                 {"episodes", round.episodes},
                                 {"step", round.step},
                                 {"lr", round.lr},
                                 {"mean_return", round.episode.total_return},
                                 {"mean_sharpe", round.episode.sharpe},
                                 {"mean_max_drawdown", round.episode.max_drawdown},
                                 {"mean_reward", round.episode.reward},
                                 {"mean_cost", round.episode.cost},
                                 {"policy_loss", round.update.policy_loss},
                                 {"value_loss", round.update.value_loss},
                                 {"entropy", round.update.entropy},
                                 {"kl", round.update.kl},
                                 {"clip_share", round.update.clip_share},
                                 {"episodes_per_second", static_cast<double>(round.episode.episodes) / round.seconds},
                                 {"seconds", round.seconds},
                                 {"world_size", round.world_size}};
  if (round.test_return) json["test_return"] = *round.test_return;
  return json.dump();
}

std::string as_line(const Round& round) {
  std::string line = fmt::format(
      "Round {}/{} - Episodes: {}/{}, Return: {:+.1f}%, Sharpe: {:+.2f}, Drawdown: {:.1f}% | Policy Loss: {:.4f}, "
      "Value "
      "Loss: {:.4f}",
      round.round, round.rounds, round.episodes, round.num_episodes, 100 * round.episode.total_return,
      round.episode.sharpe, 100 * round.episode.max_drawdown, round.update.policy_loss, round.update.value_loss);
  if (round.test_return) line += fmt::format(" | Unseen: {:+.1f}%", 100 * *round.test_return);
  return line + fmt::format(" | {:.1f} s, {:.1f} episodes/s", round.seconds,
                            static_cast<double>(round.episode.episodes) / round.seconds);
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
  constexpr double kWidth = 720, kHeight = 420, kLeft = 70, kRight = 20, kTop = 40, kBottom = 70;
  const std::vector<Curve> curves = curves_of(test);
  double lowest = 100, highest = 100;  // In percent of the first day's value.
  for (const Curve& curve : curves) {
    for (const double value : *curve.values) {
      lowest = std::min(lowest, 100 * value / curve.values->front());
      highest = std::max(highest, 100 * value / curve.values->front());
    }
  }
  const double step = svg::round_step(std::max(highest - lowest, 1.0) / 6);
  lowest = step * std::floor(lowest / step);
  highest = step * std::ceil(highest / step);
  const double base = kHeight - kBottom, scale = (base - kTop) / (highest - lowest);
  const double days = static_cast<double>(std::max<std::size_t>(test.dates.size() - 1, 1));
  const auto x_of = [&](std::size_t day) {
    return kLeft + (kWidth - kLeft - kRight) * static_cast<double>(day) / days;
  };
  std::string body =
      svg::text_at(kWidth / 2, 24, "middle", "Value on the unseen days, percent of the first", " class=\"title\"");
  for (double value = lowest; value <= highest + step / 2; value += step) {
    const double y = base - (value - lowest) * scale;
    body += svg::line(kLeft, y, kWidth - kRight, y, "stroke=\"#e4e4e4\"");
    body += svg::text_at(kLeft - 6, y + 4, "end", fmt::format("{:.6g}", value), " class=\"tick\"");
  }
  for (int tick = 0; tick <= 4; ++tick) {
    const auto day = static_cast<std::size_t>(days * tick / 4);
    body += svg::text_at(x_of(day), base + 18,
                         tick == 0   ? "start"
                         : tick == 4 ? "end"
                                     : "middle",
                         test.dates[day], " class=\"tick\"");
  }
  for (std::size_t i = 0; i < curves.size(); ++i) {
    const std::vector<double>& values = *curves[i].values;
    std::string points;
    for (std::size_t day = 0; day < values.size(); ++day)
      points += fmt::format("{:.1f},{:.1f} ", x_of(day), base - (100 * values[day] / values.front() - lowest) * scale);
    body += fmt::format("<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"1.5\" points=\"{}\"/>\n",
                        svg::kColours[2 * i], points);
    const double x = kLeft + static_cast<double>(i) * 170;
    body += svg::line(x, kHeight - 24, x + 20, kHeight - 24,
                      fmt::format("stroke=\"{}\" stroke-width=\"2\"", svg::kColours[2 * i]));
    body += svg::text_at(x + 26, kHeight - 20, "start", curves[i].name);
  }
  return svg::document(kWidth, kHeight, body);
}

void write_to(ddpkit::train::SummaryWriter& writer, const Round& round) {
  writer.add_scalar("episode/return", round.episode.total_return, round.step);
  writer.add_scalar("episode/sharpe", round.episode.sharpe, round.step);
  writer.add_scalar("episode/max_drawdown", round.episode.max_drawdown, round.step);
  writer.add_scalar("loss/policy", round.update.policy_loss, round.step);
  writer.add_scalar("loss/value", round.update.value_loss, round.step);
  writer.add_scalar("policy/entropy", round.update.entropy, round.step);
  writer.add_scalar("policy/kl", round.update.kl, round.step);
  writer.add_scalar("policy/clip_share", round.update.clip_share, round.step);
  writer.add_scalar("training/lr", round.lr, round.step);
  if (round.test_return) writer.add_scalar("test/return", *round.test_return, round.step);
}

}  // namespace clstm_ppo
