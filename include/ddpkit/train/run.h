// Tier 1: ATen/core/Tensor.h, through grad_scaler.h. nlohmann-json is only declared.
#pragma once

#include <c10/core/GradMode.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/optim/grad_scaler.h>
#include <ddpkit/optim/learning_rate.h>
#include <ddpkit/optim/precision.h>
#include <ddpkit/train/checkpoint.h>
#include <ddpkit/train/progress.h>
#include <ddpkit/train/run_folder.h>
#include <ddpkit/train/run_options.h>
#include <ddpkit/train/stop_signal.h>
#include <ddpkit/train/summary_writer.h>

namespace torch::nn {
class Module;
}

namespace ddpkit::train {

/// The objects and numbers of a training that Run needs.
struct RunParts {
  torch::nn::Module& model;            ///< Without a wrapper, on its device.
  torch::optim::Optimizer& optimizer;  ///< Of the model.
  std::int64_t updates_per_epoch = 0;  ///< In a whole epoch.
  int devices = 1;                     ///< Over all ranks: for RunOptions::lr_scaling.
  /// Upper limit of the factor with which a scaled learning rate begins its warm-up.
  double most_warmup_start = 1;
  /// Other state to save, such as a sampler. Run adds "scheduler" and "scaler".
  std::vector<CheckpointPart> state = {};
  /// Keys of the run's description that may differ when it resumes.
  std::vector<std::string> facts_that_may_differ = {"world_size"};
};

/// The surroundings of a training loop: precision, learning rate, checkpoints, stop signal and TensorBoard. The loop
/// belongs to the user. Each part is also usable alone: GradScaler, LearningRateScheduler, open_run_folder(),
/// Checkpoint, StopSignal, ProgressBar, SummaryWriter.
///
///     Run run(options, declared, group);
///     run.start({.model = *model, .optimizer = optimizer, .updates_per_epoch = n, .state = {...}}, {{"data", name}});
///     while (run.has_epoch()) {
///       sampler.set_epoch(run.epoch());
///       Epoch epoch(run, updates, samples, "samples");
///       while (epoch.next()) {
///         run.scaler().scale(loss_of(batch)).backward();
///         run.step_optimizer();
///         sampler.set_position(samples_so_far);
///         epoch.advance();
///       }
///       if (!epoch.finish(mean_loss)) break;
///       sampler.set_epoch(run.epoch());
///       run.save();
///       epoch.report(...);
///     }
///     if (!run.finish()) return;  // Stopped by a signal.
class Run {
 public:
  /// `options` and `declared` (with all options of the program) must outlive the run.
  Run(const RunOptions& options, const Options& declared, const ProcessGroup& group);

  /// Creates the learning rate scheduler and installs the handlers of StopSignal. With RunOptions::save_dir, opens the
  /// folder and resumes the run in it: loads model, optimizer, state and progress. `facts`: a JSON object that
  /// describes the run together with the options; Run adds "program", "precision" and "world_size". Collective. Throws
  /// InvalidArgument as open_run_folder() does. The objects in `parts` must outlive the run.
  void start(const RunParts& parts, const nlohmann::json& facts);

  bool is_main() const { return group_.rank() == 0; }                ///< Rank 0 prints and writes files.
  bool prints() const { return is_main() && !options_.json; }        ///< Rank 0 prints text, not JSON.
  std::int64_t epoch() const noexcept { return info_.epoch; }        ///< Epochs finished.
  std::int64_t step() const noexcept { return info_.step; }          ///< Updates made.
  bool is_resumed() const { return folder_.to_resume.has_value(); }  ///< start() has loaded a checkpoint.
  bool is_saved() const { return checkpoint_.has_value(); }          ///< The run has a folder.
  bool is_stopped() const noexcept { return is_stopped_; }           ///< A signal has ended the loop.

  /// Returns "off", "bfloat16" or "float16".
  const char* precision_name() const;
  /// Enables the run's mixed precision on `device` within a scope.
  optim::Autocast autocast(c10::Device device) const;
  optim::GradScaler& scaler() noexcept { return scaler_; }                    ///< Enabled for float16 only.
  optim::LearningRateScheduler& scheduler() noexcept { return *scheduler_; }  ///< After start().

  /// Updates the weights, unless float16 gradients overflowed on any rank, then the gradient scale and the learning
  /// rate. Collective.
  void step_optimizer();

  /// Returns whether an epoch remains, within RunOptions::epochs and max_steps.
  bool has_epoch() const { return info_.epoch < options_.epochs && !is_out_of_steps(); }

  /// Saves a checkpoint in the background; with `is_best` also as best.pt. Does nothing without a folder. Collective.
  /// Throws the error of the previous checkpoint.
  void save(bool is_best = false);

  /// Waits for the last checkpoint. Returns false if a signal has stopped the run; rank 0 then reports the signal and
  /// the step of the last save(). Collective.
  bool finish();

  void note_update() noexcept { ++info_.step; }  ///< Counts an update. Only a loop without Epoch calls it.
  void note_epoch() noexcept { ++info_.epoch; }  ///< Counts an epoch. Only a loop without Epoch calls it.

  /// Returns whether the loop must end, at RunOptions::max_steps or on a stop signal. Collective: call it once per
  /// update.
  bool must_end();

  /// Returns the writer of rank 0; null on other ranks and without TensorBoard.
  SummaryWriter* summary() noexcept { return summary_ ? &*summary_ : nullptr; }

  /// Prints "resumed from FILE, WHERE" if the run resumed. Rank 0 calls it.
  void print_resumed(const std::string& where) const;

 private:
  friend class Epoch;

  bool is_out_of_steps() const { return options_.max_steps && info_.step >= *options_.max_steps; }
  optim::Schedule schedule(const RunParts& parts) const;

  const RunOptions& options_;
  const Options& declared_;
  ProcessGroup group_;
  at::ScalarType amp_;
  optim::GradScaler scaler_;
  std::optional<optim::LearningRateScheduler> scheduler_;
  torch::nn::Module* model_ = nullptr;
  torch::optim::Optimizer* optimizer_ = nullptr;
  std::vector<CheckpointPart> state_;
  RunFolder folder_;
  std::optional<Checkpoint> checkpoint_;
  CheckpointInfo info_;  // The progress of the run.
  std::optional<SummaryWriter> summary_;
  std::optional<StopSignal> stop_;
  bool is_stopped_ = false;
  std::int64_t kept_step_ = 0;  // Step of the last save().
};

/// The updates of one epoch, or of the rest of an epoch within which the run resumed. Counts the updates and times
/// them, shows a ProgressBar, and saves checkpoints every RunOptions::save_steps updates.
class Epoch {
 public:
  /// `updates`: to make. `items`: of all ranks in these updates; `unit` is their name: "clips".
  Epoch(Run& run, std::int64_t updates, std::int64_t items, const std::string& unit);

  /// Call before each update. Returns false after the last update, at RunOptions::max_steps, and on a stop signal. A
  /// signal saves the progress if this epoch has made an update. Collective.
  bool next();

  /// Call after each update, when the sampler's position is set. `note`: see ProgressBar::advance(). Collective if it
  /// saves.
  void advance(const std::function<std::string()>& note = nullptr);

  /// Ends the epoch and counts it if it is whole. Returns whether it is whole. `loss`: mean over the epoch, equal on
  /// all ranks. Throws Error if the loss is not finite.
  bool finish(double loss = 0);

  double lr() const noexcept { return lr_; }            ///< Learning rate of the last update.
  double seconds() const noexcept { return seconds_; }  ///< Time of the updates, set by finish().
  double items_per_second() const noexcept { return static_cast<double>(items_) / seconds_; }  ///< Of all ranks.

  /// Prints on rank 0 "Epoch 1/30 - LINE", or with RunOptions::json a line of JSON with epoch, epochs, step, lr and
  /// `values`. Writes `scalars` and the learning rate to TensorBoard. Call it after finish().
  void report(const std::string& line, const nlohmann::ordered_json& values,
              const std::vector<std::pair<std::string, double>>& scalars);

 private:
  Run& run_;
  std::int64_t updates_, items_, done_ = 0;
  double lr_ = 0, seconds_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  ProgressBar bar_;
};

/// A scope without gradients in which all ranks evaluate the model of rank 0. The running statistics of batch norm
/// differ between ranks; the scope broadcasts rank 0's buffers, which the checkpoint holds. The model is in evaluation
/// mode. The end of the scope restores the previous mode.
class EvaluationScope {
 public:
  /// Collective.
  EvaluationScope(torch::nn::Module& model, const ProcessGroup& group);
  ~EvaluationScope();
  EvaluationScope(const EvaluationScope&) = delete;
  EvaluationScope& operator=(const EvaluationScope&) = delete;

 private:
  torch::nn::Module& model_;
  bool was_training_;
  c10::NoGradGuard no_grad_;
};

}  // namespace ddpkit::train
