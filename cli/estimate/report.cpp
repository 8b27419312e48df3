#include "report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include "bench/plot.h"

namespace ddpkit::cli {
namespace {

double bytes_of(const scaling::StepProfile& profile) {
  double bytes = 0;
  for (const scaling::BucketProfile& bucket : profile.buckets) bytes += bucket.bytes;
  return bytes;
}

}  // namespace

std::optional<Limits> limits_of(const scaling::StepProfile& profile, const LinkModel& links,
                                const scaling::StepOptions& options) {
  if (!links.any_number) return std::nullopt;
  const auto below = [&](double efficiency) {
    return scaling::devices_at_efficiency(profile, links.all_reduce, efficiency, links.most_devices, options);
  };
  return Limits{.below_80 = below(.8), .below_50 = below(.5)};
}

std::string estimate_table(const scaling::StepProfile& profile, const LinkModel& links,
                           const std::vector<scaling::TrainingEstimate>& estimates,
                           const std::optional<Limits>& limits) {
  const auto any = [&](double scaling::TrainingEstimate::*field) {
    return std::any_of(estimates.begin(), estimates.end(), [&](const auto& e) { return e.*field > 0; });
  };
  const bool has_hours = any(&scaling::TrainingEstimate::hours), has_cost = any(&scaling::TrainingEstimate::cost);
  std::string text = fmt::format(
      "one device: forward {:.3f} ms, backward {:.3f} ms, update and the rest {:.3f} ms; {:.1f} MB of gradients in {} "
      "bucket{}\n{}\n\n",
      profile.forward_us / 1e3, profile.backward_us / 1e3, profile.other_us / 1e3, bytes_of(profile) / 1e6,
      profile.buckets.size(), profile.buckets.size() == 1 ? "" : "s", links.name);
  text += fmt::format("{:>8} {:>11} {:>9} {:>11} {:>11} {:>11} {:>12}{}{}  {}\n", "devices", "step ms", "speed-up",
                      "efficiency", "exposed ms", "hidden ms", "straggle ms", has_hours ? "      hours" : "",
                      has_cost ? "       cost" : "", "all-reduce");
  for (const scaling::TrainingEstimate& e : estimates) {
    const double hidden = std::max(0.0, e.step.communication_us - e.step.exposed_us);
    text += fmt::format("{:>8} {:>11.3f} {:>8.2f}x {:>9.1f} % {:>11.3f} {:>11.3f} {:>12.3f}{}{}  {}\n", e.devices,
                        e.step.us / 1e3, e.speedup, 100 * e.efficiency, e.step.exposed_us / 1e3, hidden / 1e3,
                        e.step.straggler_us / 1e3, has_hours ? fmt::format(" {:>10.2f}", e.hours) : "",
                        has_cost ? fmt::format(" {:>10.2f}", e.cost) : "", e.step.algorithm);
  }
  if (!limits) return text;
  const auto from = [&](int devices) {
    return devices > 0 ? fmt::format("from {} devices on", devices)
                       : fmt::format("nowhere up to {} devices", links.most_devices);
  };
  return text +
         fmt::format("\nefficiency below 80 %: {}; below 50 %: {}\n", from(limits->below_80), from(limits->below_50));
}

std::string memory_table(const std::vector<scaling::TrainingEstimate>& estimates,
                         const std::vector<scaling::RankMemory>& memory) {
  if (memory.empty()) return {};
  std::string text = fmt::format(
      "\nmemory of a device in MB, without activations\n{:>8} {:>11} {:>11} {:>11} {:>12} {:>21} "
      "{:>11}\n",
      "devices", "weights", "gradients", "optimizer", "whole units", "gradients in progress", "total");
  for (std::size_t i = 0; i < memory.size(); ++i)
    text += fmt::format("{:>8} {:>11.1f} {:>11.1f} {:>11.1f} {:>12.1f} {:>21.1f} {:>11.1f}\n", estimates[i].devices,
                        memory[i].weights / 1e6, memory[i].gradients / 1e6, memory[i].optimizer / 1e6,
                        memory[i].whole_units / 1e6, memory[i].gradients_in_progress / 1e6, memory[i].total() / 1e6);
  return text;
}

std::string estimate_json(const scaling::StepProfile& profile, const LinkModel& links,
                          const std::vector<scaling::TrainingEstimate>& estimates, const std::optional<Limits>& limits,
                          const std::vector<scaling::RankMemory>& memory) {
  nlohmann::json document = {
      {"links", links.name},          {"forward_us", profile.forward_us},    {"backward_us", profile.backward_us},
      {"other_us", profile.other_us}, {"gradient_bytes", bytes_of(profile)}, {"estimates", nlohmann::json::array()}};
  if (limits) {
    document["below_80_percent_from"] = limits->below_80;
    document["below_50_percent_from"] = limits->below_50;
  }
  for (const scaling::TrainingEstimate& e : estimates)
    document["estimates"].push_back({{"devices", e.devices},
                                     {"step_us", e.step.us},
                                     {"speedup", e.speedup},
                                     {"efficiency", e.efficiency},
                                     {"communication_us", e.step.communication_us},
                                     {"exposed_us", e.step.exposed_us},
                                     {"contention_us", e.step.contention_us},
                                     {"straggler_us", e.step.straggler_us},
                                     {"algorithm", e.step.algorithm},
                                     {"hours", e.hours},
                                     {"cost", e.cost}});
  for (std::size_t i = 0; i < memory.size(); ++i)
    document["estimates"][i]["memory_bytes"] = {{"weights", memory[i].weights},
                                                {"gradients", memory[i].gradients},
                                                {"optimizer", memory[i].optimizer},
                                                {"whole_units", memory[i].whole_units},
                                                {"gradients_in_progress", memory[i].gradients_in_progress},
                                                {"total", memory[i].total()}};
  return document.dump();
}

std::string estimate_plot(const LinkModel& links, const std::vector<scaling::TrainingEstimate>& estimates) {
  bench::Curve predicted{.name = "predicted speed-up", .points = {}};
  bench::Curve ideal{.name = "as many times as devices", .points = {}, .dashed = true};
  for (const scaling::TrainingEstimate& e : estimates) {
    predicted.points.emplace_back(e.devices, e.speedup);
    ideal.points.emplace_back(e.devices, e.devices);
  }
  return bench::draw_log_log({{.title = links.name, .curves = {predicted, ideal}}}, "speed-up", "devices");
}

std::string published_table(const std::vector<PublishedPoint>& points) {
  std::string text =
      fmt::format("{:<26} {:<22} {:>13} {:>13} {:>9}\n", "published curve", "", "measured", "predicted", "error");
  for (const PublishedPoint& point : points)
    text += fmt::format("{:<26} {:<22} {:>13.1f} {:>13.1f} {:>+7.1f} % {}\n", point.curve, point.what, point.measured,
                        point.predicted, 100 * point.error(), point.unit);
  return text;
}

}  // namespace ddpkit::cli
