// Tier 1: ATen/core/Tensor.h, through grad_scaler.h. nlohmann-json is only declared.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/GradMode.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
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

namespace ddpkit {
class DistributedDataParallelBase;
class LengthBucketedSampler;
class ResumableSampler;
namespace optim {
class Elastic;
}
}  // namespace ddpkit

namespace ddpkit::train {

class History;
struct ClassificationResult;
class ProfileWindow;

/// The objects and numbers of a training that Run needs.
struct RunParts {
  torch::nn::Module& model;            ///< Without a wrapper, on its device.
  torch::optim::Optimizer& optimizer;  ///< Of the model.
  /// The wrapper of the model, for the phases of RunOptions::profile. Null: none.
  DistributedDataParallelBase* wrapper = nullptr;
  std::string model_name = "model";  ///< In the first lines: "3D-CNN".
  std::string optimizer_name = {};   ///< In the first lines: "adamw".
  std::string epoch_name = "Epoch";  ///< The word for an epoch in lines, such as "Round".
  /// The sampler of the training set. Run saves it as "sampler"; Epoch sets its epoch and position. A run that resumes
  /// on another number of devices has another number of updates per epoch, so its learning rate continues from the same
  /// fraction of the run. Null: the loop does all this.
  ResumableSampler* sampler = nullptr;
  /// The same for a sampler of whole batches, one per update. At most one of the two.
  LengthBucketedSampler* batches = nullptr;
  std::int64_t updates_per_epoch = 0;  ///< In a whole epoch. Run sets it if there is a sampler.
  /// Upper limit of the factor with which a scaled learning rate begins its warm-up.
  double most_warmup_start = 1;
  bool resumes_within_epoch = true;  ///< False: a stop signal saves no checkpoint within an epoch.
  /// Other state to save. Run adds "scheduler" and "scaler".
  std::vector<CheckpointPart> state = {};
  /// Keys of the run's description that may differ when it resumes.
  std::vector<std::string> facts_that_may_differ = {"world_size"};
};

/// The surroundings of a training loop: precision, learning rate, checkpoints, stop signal, console, curves and
/// TensorBoard. The loop belongs to the user. Each part is also usable alone: GradScaler, LearningRateScheduler,
/// open_run_folder(), Checkpoint, StopSignal, ProgressBar, SummaryWriter. docs/trainers.md shows the console.
///
///     Run run(options, declared, group);
///     run.print("Loading data...");
///     ...
///     run.print_batches(run.batches_of(sampler.num_samples()));
///     run.start({.model = *model, .optimizer = optimizer, .wrapper = &ddp, .sampler = &sampler}, {{"data", name}});
///     while (run.has_epoch()) {
///       Epoch epoch(run, "samples");
///       epoch.retry([&] {
///         for (std::int64_t i = 0; epoch.next(); ++i) {
///           optimizer.zero_grad();
///           run.scaler().scale(loss_of(epoch.batch(i))).backward();
///           run.step_optimizer();
///           epoch.advance();
///         }
///       });
///       if (!epoch.finish(mean_loss)) break;
///       run.save();
///       epoch.report(...);
///     }
///     if (!run.finish()) return;  // Stopped by a signal.
///     run.print_summary("test accuracy 94.1 %");
class Run {
 public:
  /// Prints the number of devices and the device of rank 0. `options` and `declared` (with all options of the program)
  /// must outlive the run; start() sets an empty RunOptions::save_dir. `devices`: of this process; empty: the group's
  /// device.
  Run(RunOptions& options, const Options& declared, const ProcessGroup& group, std::vector<c10::Device> devices = {});
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// Returns the number of batches of this process with `samples` samples. A batch has RunOptions::batch_size samples
  /// per device.
  std::int64_t batches_of(std::size_t samples) const;

  /// Prints the batches of an epoch and the effective batch size. `train` and `evaluation`: batches per device; 0: not
  /// printed. `evaluation_name`: "Val" or "Test". `batch_size`: samples per device and batch; 0:
  /// RunOptions::batch_size. `unit`: the name of the samples, printed if it is not empty.
  void print_batches(std::int64_t train, std::int64_t evaluation = 0, const std::string& evaluation_name = "Val",
                     double batch_size = 0, const std::string& unit = "") const;

  /// Prints "Creating model...", seeds the random generators with RunOptions::seed, and returns make() on the device of
  /// the group: the same weights on all ranks.
  template <class Make>
  auto make_model(const Make& make) const {
    seed_model();
    auto model = make();
    model->to(group_.device());
    return model;
  }

  /// Creates the learning rate scheduler and installs the handlers of StopSignal. With RunOptions::save, opens the run
  /// folder and resumes the run in it: loads model, optimizer, state and progress. `facts`: a JSON object that
  /// describes the run together with the options; Run adds "program", "precision" and "world_size". Prints the model,
  /// and from where the run resumes. Collective. Throws InvalidArgument as open_run_folder() does. The objects in
  /// `given` must outlive the run.
  void start(const RunParts& given, const nlohmann::json& facts);

  /// Rank 0 prints and writes files. A new rank that waits does not.
  bool is_main() const { return group_.rank() == 0 && !group_.is_joining(); }
  bool prints() const { return is_main() && !options_.json; }        ///< Rank 0 prints text, not JSON.
  int devices() const;                                               ///< Over all ranks.
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

  /// Calls `action`, such as an evaluation. With RunOptions::elastic, all remaining ranks call it again after each loss
  /// of a rank. Updates belong into Epoch::retry(). The functions of Run and Epoch retry automatically. Collective.
  void retry(const std::function<void()>& action);

  /// Saves a checkpoint; with `is_best` also as best.pt and best_model_epochN.pt (N from 0). Writes in the background,
  /// except with RunOptions::elastic. Does nothing without a folder. Collective. Throws the error of the previous
  /// checkpoint.
  void save(bool is_best = false);

  /// Waits for the last checkpoint. Returns false if a signal has stopped the run; rank 0 then reports the signal and
  /// the step of the last save(). Collective.
  bool finish();

  /// Prints a line on rank 0, but not with RunOptions::json.
  void print(const std::string& line) const;

  /// Returns the bar of a loop within epoch `epoch` (from 1): "Epoch 1/30 Validation". RunOptions::progress: bar: on a
  /// terminal only; lines: heartbeats without a terminal; auto: both, but no heartbeats with RunOptions::json.
  /// `items_per_step`: over all ranks.
  ProgressBar bar(std::int64_t epoch, const std::string& loop, std::int64_t steps, const std::string& unit = "",
                  double items_per_step = 1) const;

  /// Prints that save() has kept the best checkpoint so far, if the run has a folder. `score`: "F1: 0.6821".
  void print_best(const std::string& score) const;

  /// Writes a text file into the run's folder, atomically, on rank 0.
  void write_file(const std::string& name, const std::string& text) const;

  /// Prints the last lines: number of epochs and updates, time, rate, peak memory of each rank or GPU, files, and
  /// `result`. With RunOptions::json only `result`. Collective.
  void print_summary(const std::string& result);

 private:
  friend class Epoch;

  bool must_end();  // At RunOptions::max_steps or on a stop signal. Collective: once per update.
  void report(const std::string& line, const nlohmann::ordered_json& values,
              const std::vector<std::pair<std::string, double>>& scalars);
  void open_folder(const std::string& description, const std::vector<std::string>& facts_that_may_differ);
  void start_elastic(const RunParts& parts);
  void open_checkpoint();
  /// What new ranks get from rank 0, besides weights and optimizer.
  struct Shared {
    void save(torch::serialize::OutputArchive& archive) const;
    void load(torch::serialize::InputArchive& archive);
    Run& run;
  };
  void adapt_to_ranks();  // After the loss of a rank.
  void become_main();     // Locks the folder if this rank has become rank 0.
  void print_profile(bool is_last);
  std::int64_t samples_per_batch() const { return options_.batch_size * static_cast<std::int64_t>(devices_.size()); }
  std::int64_t updates_of(std::size_t samples) const;
  bool is_out_of_steps() const { return options_.max_steps && info_.step >= *options_.max_steps; }
  optim::Schedule schedule(std::int64_t updates_per_epoch) const;
  void make_scheduler(std::int64_t updates_per_epoch);
  void follow_sampler();                   // Sets the step of the scheduler.
  std::int64_t updates_per_epoch() const;  // Of the sampler.
  std::int64_t updates_left() const;       // In the sampler's epoch.
  void seed_model() const;
  std::string epoch_word() const;  // "epoch"
  void print_model(const RunParts& parts) const;

  RunOptions& options_;
  const Options& declared_;
  ProcessGroup group_;
  std::vector<c10::Device> devices_;  // Of this process.
  at::ScalarType amp_;
  optim::GradScaler scaler_;
  std::optional<optim::LearningRateScheduler> scheduler_;
  torch::nn::Module* model_ = nullptr;
  torch::optim::Optimizer* optimizer_ = nullptr;
  ResumableSampler* sampler_ = nullptr;
  LengthBucketedSampler* batches_ = nullptr;
  bool resumes_within_epoch_ = true;
  std::vector<CheckpointPart> state_;
  double most_warmup_start_ = 1;
  Shared shared_{*this};
  std::unique_ptr<optim::Elastic> elastic_;  // Null without RunOptions::elastic.
  bool retries_ = false;                     // Within retry().
  bool must_save_ = false;                   // The loss of a rank has interrupted save().
  RunFolder folder_;
  std::optional<Checkpoint> checkpoint_;
  CheckpointInfo info_;  // The progress of the run.
  std::optional<SummaryWriter> summary_;
  std::optional<StopSignal> stop_;
  bool is_stopped_ = false;
  std::int64_t kept_step_ = 0;              // Step of the last save().
  std::unique_ptr<ProfileWindow> profile_;  // Null without RunOptions::profile.
  std::unique_ptr<History> history_;        // Only on rank 0 of a run with a folder.
  std::string epoch_name_, unit_;           // "Epoch"; "clips".
  std::int64_t items_ = 0;                  // Trained on by all ranks since start().
  double seconds_ = 0;                      // Time of these items.
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// The updates of one epoch, or of the rest of an epoch within which the run resumed. Counts the updates and times
/// them, shows a ProgressBar, and saves checkpoints every RunOptions::save_steps updates.
class Epoch {
 public:
  /// The rest of the sampler's epoch. Without RunParts::batches, seeds the random generators; see seed_epoch(). `unit`:
  /// the name of the items: "clips". `items_per_sample`: such as characters.
  Epoch(Run& run, const std::string& unit, std::int64_t items_per_sample = 1);
  /// Without RunParts::sampler. `updates`: to make. `items`: of all ranks in these updates.
  Epoch(Run& run, std::int64_t updates, std::int64_t items, const std::string& unit);

  /// Calls `updates`: the loop over next(), and the sums over the ranks after it. With RunOptions::elastic, undoes the
  /// update in flight after each loss of a rank, and calls `updates` again on all remaining ranks. batch() then returns
  /// the samples of the epoch that no rank has used. Change the sums of the epoch after Run::step_optimizer(), because
  /// they are not undone. Collective.
  void retry(const std::function<void()>& updates);

  /// Returns false if the run has resumed within this epoch on the same number of ranks: then the checkpoint has
  /// restored the sums of each rank.
  bool is_new() const noexcept { return is_new_; }
  std::int64_t batches() const;  ///< Of this process, in the rest. The last one may be smaller.
  /// Returns the indices of batch `number` (from 0) of this process. Only with RunParts::sampler. Thread-safe. [sample]
  std::vector<std::int64_t> batch(std::int64_t number) const;

  /// Call before each update. Returns false after the last update, at RunOptions::max_steps, and on a stop signal. A
  /// signal saves the progress if this epoch has made an update. Collective.
  bool next();

  /// Call after each update. Sets the position of the sampler. `note`: see ProgressBar::advance(). Collective if it
  /// saves.
  void advance(const std::function<std::string()>& note = nullptr);

  /// Ends the epoch and counts it if it is whole; the sampler is then at the next epoch. Returns whether it is whole.
  /// `loss`: mean over the epoch, equal on all ranks. Throws Error if the loss is not finite.
  bool finish(double loss = 0);

  double lr() const noexcept { return lr_; }            ///< Learning rate of the last update.
  double seconds() const noexcept { return seconds_; }  ///< Time of the updates, set by finish().
  double items_per_second() const noexcept {            ///< Of all ranks.
    return static_cast<double>(items_before_ + items_) / seconds_;
  }

  /// Reports the epoch after finish(). Rank 0 prints "Epoch 1/30 - LINE", or with RunOptions::json `values`. Rank 0
  /// writes `scalars` (tag and value) to TensorBoard, metrics.csv and curves.svg. Tags with the same part before '/'
  /// share a chart. Adds progress, learning rate, time, rate, memory and number of ranks to `values`, and the learning
  /// rate to `scalars`. Collective.
  void report(const std::string& line, const nlohmann::ordered_json& values,
              const std::vector<std::pair<std::string, double>>& scalars);

  /// Reports the epoch of a classifier, and writes confusion.svg. `evaluation`: the results on the set `name`: "test",
  /// which is `label` in the line: "Test". `ending`: the end of the line. `more`: further values.
  void report(const ClassificationResult& train, const ClassificationResult& evaluation, const std::string& name,
              const std::string& label, const std::vector<std::string>& class_names, const std::string& ending,
              const nlohmann::ordered_json& more);

 private:
  void deal();  // Begins the rest of the sampler's epoch.
  void make_bar();
  std::int64_t items_done() const;  // Since deal().
  std::size_t position() const;     // In order_, or in the batches since deal().

  Run& run_;
  std::vector<std::size_t> order_ = {};  // Indices of this rank, with a sampler.
  bool is_new_ = true;
  std::int64_t updates_ = 0, items_ = 0, done_ = 0;  // Since deal().
  std::int64_t items_before_ = 0, items_per_sample_ = 1;
  std::uint64_t generation_;  // Of the group, at deal().
  std::string unit_;
  double lr_ = 0, seconds_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::unique_ptr<ProgressBar> bar_;  // Of the updates since deal().
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
