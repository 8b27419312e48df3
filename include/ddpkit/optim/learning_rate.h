// Tier 0: the standard library only. Torch's optimizers and archives are declared, not included.
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

/// How the learning rate follows the batch, which N ranks make N times as large.
enum class LearningRateScaling {
  kNone,
  kLinear,      ///< N times: Goyal and others, arXiv 1706.02677; begin with warmup(steps, 1.0 / N).
  kSquareRoot,  ///< sqrt(N) times: Krizhevsky, arXiv 1404.5997; the usual choice for Adam.
};

/// What the learning rate of one rank is multiplied by on `world_size` ranks. Throws InvalidArgument below 1 rank.
double learning_rate_scale(LearningRateScaling scaling, int world_size);

/// What the learning rate is multiplied by in step 0, 1, 2, ...: a pure function of the step's number, so that resuming
/// needs only that number. Any function will do; those below are the common ones. A product multiplies both factors.
class Schedule {
 public:
  /// The factor 1 throughout.
  Schedule() : Schedule([](std::int64_t) { return 1.0; }) {}
  /// Of a function of one's own: pure, as it is asked for any step in any order.
  explicit Schedule(std::function<double(std::int64_t step)> factor) : factor_(std::move(factor)) {}

  /// The factor in step `step`, from 0.
  double operator()(std::int64_t step) const { return factor_(step); }
  friend Schedule operator*(const Schedule& a, const Schedule& b) {
    return Schedule([a, b](std::int64_t step) { return a(step) * b(step); });
  }

 private:
  std::function<double(std::int64_t)> factor_;
};

/// From `start_factor` in step 0 in a straight line to 1 in step `steps`, and 1 from there on: Python's LinearLR.
Schedule warmup(std::int64_t steps, double start_factor = 1.0 / 3);

/// From 1 in step 0 along half a cosine to `end_factor` in step `steps`, and there it stays: Python's CosineAnnealingLR
/// up to T_max, after Loshchilov and Hutter, arXiv 1608.03983.
Schedule cosine_decay(std::int64_t steps, double end_factor = 0);

/// Times `gamma` after every `step_size` steps: Python's StepLR.
Schedule step_decay(std::int64_t step_size, double gamma = 0.1);

/// Times `gamma` at each of `milestones`, ascending step numbers: Python's MultiStepLR.
Schedule multi_step_decay(std::vector<std::int64_t> milestones, double gamma = 0.1);

/// One schedule after the other: `schedules[i]` ends, and `schedules[i + 1]` begins with its step 0, at step
/// `milestones[i]`. One milestone fewer than schedules: Python's SequentialLR.
Schedule sequential(std::vector<Schedule> schedules, std::vector<std::int64_t> milestones);

/// Options of LearningRateScheduler.
struct LearningRateOptions {
  LearningRateScaling scaling = LearningRateScaling::kNone;  ///< With the number of ranks.
  /// ProcessGroup::world_size().
  int world_size = 1;
};

/// Sets the learning rate of each of an optimizer's parameter groups: its base rate, times the scale for the number of
/// ranks, times the schedule's factor. Any optimizer of LibTorch's or ddpkit's. Not collective: every rank computes the
/// same.
///
///     LearningRateScheduler scheduler(optimizer, warmup(500) * cosine_decay(total_steps),
///                                     {.scaling = LearningRateScaling::kLinear, .world_size = group.world_size()});
///     ... optimizer.step(); scheduler.step();
class LearningRateScheduler {
 public:
  /// As in Python, the base rate of a group is its `initial_lr` if it has one, otherwise its learning rate. The
  /// scheduler writes `initial_lr` to the group's options (it replaces the options object), and sets the rates for step
  /// 0. Kept by: checkpoints, optimizer states, archives of ddpkit's optimizers. torch::load() of a torch::optim
  /// optimizer loses it: make the scheduler before that. The optimizer must outlive the scheduler.
  LearningRateScheduler(torch::optim::Optimizer& optimizer, Schedule schedule, const LearningRateOptions& options = {});

  /// After each optimizer.step() (or epoch, where the schedule counts epochs). Throws InvalidArgument where the
  /// optimizer has got other parameter groups meanwhile.
  void step();

  /// Goes to step `step` of the schedule, from 0: where a run that goes on on another number of ranks, and so with
  /// another number of steps an epoch, stands in its own. Throws InvalidArgument below 0.
  void set_step(std::int64_t step);

  std::int64_t steps() const noexcept { return step_; }  ///< Calls of step(), over all runs, or as set_step() said.
  std::vector<double> learning_rates() const;            ///< Now. [group]
  const std::vector<double>& base_learning_rates() const noexcept { return base_; }  ///< [group]

  /// Keeps the step and the base rates, so that a run resumed on another number of ranks goes on with its own scale.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Goes on where save() was called and sets the optimizer's rates. Throws InvalidArgument, and changes nothing, for
  /// another number of parameter groups.
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
