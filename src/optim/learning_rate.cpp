#include <ddpkit/optim/learning_rate.h>

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "optim/optimizer_archive.h"

namespace ddpkit::optim {
namespace {

void check_positive(std::int64_t steps, const char* what) {
  if (steps < 1) throw InvalidArgument(fmt::format("{} is {}, but must be at least 1", what, steps));
}

void check_ascending(const std::vector<std::int64_t>& milestones, const char* what) {
  if (!std::is_sorted(milestones.begin(), milestones.end()) || (!milestones.empty() && milestones.front() < 0))
    throw InvalidArgument(
        fmt::format("{}'s milestones [{}] are not ascending step numbers", what, fmt::join(milestones, ", ")));
}

/// Returns the number of milestones reached.
std::size_t reached(const std::vector<std::int64_t>& milestones, std::int64_t step) {
  return static_cast<std::size_t>(std::upper_bound(milestones.begin(), milestones.end(), step) - milestones.begin());
}

}  // namespace

double learning_rate_scale(LearningRateScaling scaling, int world_size) {
  if (world_size < 1) throw InvalidArgument(fmt::format("world_size is {}, but must be at least 1", world_size));
  switch (scaling) {
    case LearningRateScaling::kLinear:
      return world_size;
    case LearningRateScaling::kSquareRoot:
      return std::sqrt(world_size);
    default:
      return 1;
  }
}

Schedule warmup(std::int64_t steps, double start_factor) {
  check_positive(steps, "warmup's number of steps");
  return Schedule([=](std::int64_t step) {
    if (step >= steps) return 1.0;
    return start_factor + (1 - start_factor) * static_cast<double>(step) / static_cast<double>(steps);
  });
}

Schedule cosine_decay(std::int64_t steps, double end_factor) {
  check_positive(steps, "cosine_decay's number of steps");
  return Schedule([=](std::int64_t step) {
    const double part = static_cast<double>(std::min(step, steps)) / static_cast<double>(steps);
    return end_factor + (1 - end_factor) * (1 + std::cos(std::numbers::pi * part)) / 2;
  });
}

Schedule step_decay(std::int64_t step_size, double gamma) {
  check_positive(step_size, "step_decay's step_size");
  return Schedule([=](std::int64_t step) { return std::pow(gamma, static_cast<double>(step / step_size)); });
}

Schedule multi_step_decay(std::vector<std::int64_t> milestones, double gamma) {
  check_ascending(milestones, "multi_step_decay");
  return Schedule([milestones = std::move(milestones), gamma](std::int64_t step) {
    return std::pow(gamma, static_cast<double>(reached(milestones, step)));
  });
}

Schedule sequential(std::vector<Schedule> schedules, std::vector<std::int64_t> milestones) {
  check_ascending(milestones, "sequential");
  if (schedules.size() != milestones.size() + 1)
    throw InvalidArgument(fmt::format("sequential needs one milestone fewer than schedules, but got {} for {}",
                                      milestones.size(), schedules.size()));
  return Schedule([schedules = std::move(schedules), milestones = std::move(milestones)](std::int64_t step) {
    const std::size_t which = reached(milestones, step);
    return schedules[which](which == 0 ? step : step - milestones[which - 1]);
  });
}

LearningRateScheduler::LearningRateScheduler(torch::optim::Optimizer& optimizer, Schedule schedule,
                                             const LearningRateOptions& options)
    : optimizer_(&optimizer),
      schedule_(std::move(schedule)),
      scale_(learning_rate_scale(options.scaling, options.world_size)),
      base_(learning_rates()) {
  for (std::size_t g = 0; g < base_.size(); ++g)
    base_[g] = initial_rate(std::as_const(optimizer).param_groups()[g].options()).value_or(base_[g]);
  keep_base();
  apply();
}

void LearningRateScheduler::keep_base() {
  for (std::size_t g = 0; g < base_.size(); ++g) set_initial_rate(optimizer_->param_groups()[g], base_[g]);
}

void LearningRateScheduler::step() {
  if (optimizer_->param_groups().size() != base_.size())
    throw InvalidArgument(fmt::format(
        "the optimizer has {} parameter groups, but had {} when its LearningRateScheduler was made: add groups first",
        optimizer_->param_groups().size(), base_.size()));
  ++step_;
  apply();
}

void LearningRateScheduler::set_step(std::int64_t step) {
  if (step < 0) throw InvalidArgument(fmt::format("the schedule cannot go to step {}: at least 0", step));
  step_ = step;
  apply();
}

std::vector<double> LearningRateScheduler::learning_rates() const {
  std::vector<double> rates;
  for (const auto& group : std::as_const(*optimizer_).param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

void LearningRateScheduler::apply() {
  const double factor = scale_ * schedule_(step_);
  for (std::size_t g = 0; g < base_.size(); ++g) optimizer_->param_groups()[g].options().set_lr(base_[g] * factor);
}

void LearningRateScheduler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("step", c10::IValue(step_));
  archive.write("base_lrs", c10::IValue(base_));
}

void LearningRateScheduler::load(torch::serialize::InputArchive& archive) {
  const std::int64_t step = read_value(archive, "step").toInt();
  const auto rates = read_value(archive, "base_lrs").toDoubleVector();
  if (rates.size() != optimizer_->param_groups().size())
    throw InvalidArgument(
        fmt::format("the learning-rate schedule was saved with {} parameter groups, but the optimizer has {}",
                    rates.size(), optimizer_->param_groups().size()));
  step_ = step;
  base_ = rates;
  keep_base();
  apply();
}

}  // namespace ddpkit::optim
