// Tier 0: the standard library only. Torch's optimizers and archives are only declared.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace torch::optim {
class Optimizer;
}
namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace ddpkit::optim {

/// How the learning rate grows with the number of ranks N, which multiplies the batch size by N.
enum class LearningRateScaling {
  kNone,        ///< Does not grow.
  kLinear,      ///< Times N: Goyal and others, arXiv 1706.02677; begin with warmup(steps, 1.0 / N).
  kSquareRoot,  ///< Times sqrt(N): Krizhevsky, arXiv 1404.5997; the usual choice for Adam.
};

/// Returns the factor of the learning rate for `world_size` ranks. Throws InvalidArgument below 1 rank.
double learning_rate_scale(LearningRateScaling scaling, int world_size);

/// The factor of the learning rate in step 0, 1, 2, ... A pure function of the step, so resuming needs only the step.
/// Any function is possible; the common ones are below. The product of two schedules multiplies their factors.
class Schedule {
 public:
  /// The factor is always 1.
  Schedule() : Schedule([](std::int64_t) { return 1.0; }) {}
  /// Wraps a function. It must be pure: it is called for any step in any order.
  explicit Schedule(std::function<double(std::int64_t step)> factor) : factor_(std::move(factor)) {}

  /// Returns the factor in step `step`, from 0.
  double operator()(std::int64_t step) const { return factor_(step); }
  /// Returns the schedule whose factor is the product of both factors.
  friend Schedule operator*(const Schedule& a, const Schedule& b) {
    return Schedule([a, b](std::int64_t step) { return a(step) * b(step); });
  }

 private:
  std::function<double(std::int64_t)> factor_;
};

/// Linear from `start_factor` in step 0 to 1 in step `steps`, then constant: Python's LinearLR.
Schedule warmup(std::int64_t steps, double start_factor = 1.0 / 3);

/// Half a cosine from 1 in step 0 to `end_factor` in step `steps`, then constant: Python's CosineAnnealingLR up to
/// T_max, after Loshchilov and Hutter, arXiv 1608.03983.
Schedule cosine_decay(std::int64_t steps, double end_factor = 0);

/// Multiplies by `gamma` every `step_size` steps: Python's StepLR.
Schedule step_decay(std::int64_t step_size, double gamma = 0.1);

/// Multiplies by `gamma` at each of `milestones`, ascending step numbers: Python's MultiStepLR.
Schedule multi_step_decay(std::vector<std::int64_t> milestones, double gamma = 0.1);

/// Runs schedules one after the other. At step `milestones[i]`, `schedules[i]` ends and `schedules[i + 1]` begins with
/// its step 0. One milestone fewer than schedules: Python's SequentialLR.
Schedule sequential(std::vector<Schedule> schedules, std::vector<std::int64_t> milestones);

/// Options of LearningRateScheduler.
struct LearningRateOptions {
  LearningRateScaling scaling = LearningRateScaling::kNone;  ///< Scaling with the number of ranks.
  /// Number of ranks: ProcessGroup::world_size().
  int world_size = 1;
};

/// Sets the learning rate of each parameter group of an optimizer: base rate, times the factor for the number of ranks,
/// times the schedule's factor. Works with any optimizer of LibTorch or ddpkit. Not collective: every rank computes the
/// same.
///
///     LearningRateScheduler scheduler(optimizer, warmup(500) * cosine_decay(total_steps),
///                                     {.scaling = LearningRateScaling::kLinear, .world_size = group.world_size()});
///     ... optimizer.step(); scheduler.step();
class LearningRateScheduler {
 public:
  /// As in Python, the base rate of a group is its `initial_lr` if the group has one, otherwise its learning rate. The
  /// constructor writes `initial_lr` to the group's options (it replaces the options object), and sets the rates for
  /// step 0. Checkpoints, optimizer states and archives of ddpkit's optimizers keep `initial_lr`. torch::load() of a
  /// torch::optim optimizer loses it: create the scheduler before torch::load(). The optimizer must outlive the
  /// scheduler.
  LearningRateScheduler(torch::optim::Optimizer& optimizer, Schedule schedule, const LearningRateOptions& options = {});

  /// Call after each optimizer.step(), or after each epoch if the schedule counts epochs. Throws InvalidArgument if the
  /// number of parameter groups of the optimizer has changed.
  void step();

  /// Moves to step `step` of the schedule, from 0. Use it to resume on another number of ranks, because the number of
  /// steps per epoch differs. Throws InvalidArgument below 0.
  void set_step(std::int64_t step);

  std::int64_t steps() const noexcept { return step_; }  ///< Calls of step() over all runs, or set by set_step().
  std::vector<double> learning_rates() const;            ///< Current rates. [group]
  const std::vector<double>& base_learning_rates() const noexcept { return base_; }  ///< [group]

  /// Saves the step and the base rates. A run that resumes on another number of ranks uses its new scale.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Resumes at the saved step and sets the optimizer's rates. Throws InvalidArgument, and changes nothing, if the
  /// number of parameter groups differs.
  void load(torch::serialize::InputArchive& archive);

 private:
  void keep_base();
  void apply();

  torch::optim::Optimizer* optimizer_;
  Schedule schedule_;
  double scale_;
  std::int64_t step_ = 0;
  std::vector<double> base_;  ///< [group]
};

}  // namespace ddpkit::optim
