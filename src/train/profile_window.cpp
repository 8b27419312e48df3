#include "train/profile_window.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/parallel/distributed_data_parallel.h>

namespace ddpkit::train {
namespace {

enum class Mark { kForward, kForwardEnd, kBackward, kLastGradient, kReduced };

struct Span {
  double begin = 0, end = 0;
};

struct Backward {
  Span span;
  double last_gradient = 0;  // Of its buckets.
};

// The events of a rank.
struct RankEvents {
  std::vector<Span> steps;
  std::vector<std::pair<double, Mark>> marks;
  std::map<std::int64_t, Backward> backwards;  // [step]

  void add(const nlohmann::json& event) {
    const auto name = event.at("name").get<std::string>();
    const double begin = event.at("ts").get<double>(), end = begin + event.at("dur").get<double>();
    const bool is_compute = event.at("tid").get<int>() == 0;
    if (is_compute && name == "step") steps.push_back({begin, end});
    if (is_compute && (name == "forward" || name == "broadcast buffers")) marks.emplace_back(begin, Mark::kForward);
    if (is_compute && name == "forward") marks.emplace_back(end, Mark::kForwardEnd);
    if (is_compute && name == "update") marks.emplace_back(begin, Mark::kReduced);
    if (is_compute && name == "backward")
      backwards[event.at("args").at("step").get<std::int64_t>()].span = {begin, end};
    if (is_compute || !name.starts_with("bucket ")) return;
    double& last = backwards[event.at("args").at("step").get<std::int64_t>()].last_gradient;
    last = std::max(last, begin);
  }

  void add_to(Phases& phases) {
    for (const auto& [step, backward] : backwards) {
      marks.emplace_back(backward.span.begin, Mark::kBackward);
      if (backward.last_gradient > 0) marks.emplace_back(backward.last_gradient, Mark::kLastGradient);
      marks.emplace_back(backward.span.end, Mark::kReduced);
    }
    std::stable_sort(marks.begin(), marks.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const Span& step : steps) add_step(phases, step);
  }

  void add_step(Phases& phases, const Span& step) const {
    ++phases.updates;
    double Phases::*phase = &Phases::data;
    double from = step.begin;
    double forward_end = NAN;  // Of the current phase.
    const auto end_phase = [&](double to, double Phases::*next) {
      phases.*phase += to - from;
      from = to;
      phase = next;
      forward_end = NAN;
    };
    for (const auto& [time, mark] : marks) {
      if (time < step.begin || time >= step.end) continue;
      if (mark == Mark::kForwardEnd) {
        forward_end = time;
      } else if (mark == Mark::kForward) {
        if (phase == &Phases::forward && std::isnan(forward_end)) continue;  // The broadcast of buffers was the begin.
        if (!std::isnan(forward_end)) end_phase(forward_end, &Phases::backward);
        end_phase(time, &Phases::forward);
      } else {
        end_phase(time, mark == Mark::kBackward       ? &Phases::backward
                        : mark == Mark::kLastGradient ? &Phases::exchange
                                                      : &Phases::update);
      }
    }
    if (!std::isnan(forward_end)) end_phase(forward_end, &Phases::backward);
    end_phase(step.end, &Phases::update);
  }
};

}  // namespace

Phases read_phases(const std::string& path) {
  std::ifstream file(path);
  std::map<int, RankEvents> ranks;
  const nlohmann::json trace = nlohmann::json::parse(file);
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    if (event.at("ph") == "X") ranks[event.at("pid").get<int>()].add(event);
  }
  Phases phases;
  for (auto& [rank, events] : ranks) events.add_to(phases);
  return phases;
}

std::string phase_table(const Phases& phases, int ranks, bool has_wrapper) {
  std::vector<std::pair<const char*, double>> rows = {{"data", phases.data},
                                                      {"forward", phases.forward},
                                                      {"backward", phases.backward},
                                                      {"exposed exchange", phases.exchange}};
  if (!has_wrapper) rows = {{"data to backward", phases.data}};
  rows.insert(rows.end(), {{"update", phases.update}, {"total", phases.total()}});
  const auto updates = static_cast<double>(phases.updates);
  std::string text =
      fmt::format("{:<22}{:>10}{:>8}", fmt::format("profile: {} updates", phases.updates / ranks), "ms", "%");
  for (const auto& [name, us] : rows)
    text += fmt::format("\n{:<22}{:>10.3f}{:>8.1f}", name, us / updates / 1e3, 100 * us / phases.total());
  return text;
}

ProfileWindow::ProfileWindow(const ProcessGroup& group, DistributedDataParallelBase* wrapper, std::string path)
    : group_(group), wrapper_(wrapper), path_(std::move(path)) {}

void ProfileWindow::begin_update() {
  in_update_ = true;
  if (timeline_) step_.emplace(timeline_->span("step"));
}

void ProfileWindow::end_update() {
  if (!std::exchange(in_update_, false)) return;
  step_.reset();
  ++seen_;
  if (seen_ == kWarmUp) {
    timeline_.emplace(group_, path_);
    if (wrapper_) wrapper_->set_timeline(timeline_);
  }
  if (seen_ == kWarmUp + kUpdates) close();
}

std::optional<Timeline::Span> ProfileWindow::update_span() const {
  if (!timeline_) return std::nullopt;
  return timeline_->span("update");
}

void ProfileWindow::close() {
  if (wrapper_) wrapper_->set_timeline(std::nullopt);
  timeline_->write();
  timeline_.reset();
  if (group_.rank() == 0) table_ = phase_table(read_phases(path_), group_.world_size(), wrapper_ != nullptr);
}

std::string ProfileWindow::finish(bool is_last) {
  if (is_last && timeline_) close();
  if (is_last && seen_ <= kWarmUp)
    table_ = fmt::format("no profile: the run has made {} updates, and --profile records updates {} to {}", seen_,
                         kWarmUp + 1, kWarmUp + kUpdates);
  return std::exchange(table_, {});
}

}  // namespace ddpkit::train
