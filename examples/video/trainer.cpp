#include "video/trainer.h"

#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include <fmt/format.h>

#include <ddpkit/ddpkit.h>
#include <ddpkit/train/checkpoint.h>
#include <ddpkit/train/json_text.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/progress.h>
#include <ddpkit/train/run_folder.h>
#include <ddpkit/train/seed.h>
#include <ddpkit/train/stop_signal.h>
#include <ddpkit/train/text.h>
#include <ddpkit/train/together.h>

#include "video/balance.h"
#include "video/best.h"
#include "video/clips.h"
#include "video/model.h"
#include "video/report.h"

namespace video {
namespace {

using ddpkit::train::print_line;

using ddpkit::train::ClassificationMetrics;
using ddpkit::train::ClassificationResult;

class Trainer {
 public:
  Trainer(const TrainOptions& options, const ddpkit::train::Options& declared, const TrialSet& set,
          const TrialSplit& split, ClipLoader& loader, const ddpkit::ProcessGroup& group)
      : options_(options),
        declared_(declared),
        set_(set),
        split_(split),
        loader_(loader),
        group_(group),
        amp_(options.run.amp ? ddpkit::optim::fastest_type(group.device()) : at::kFloat),
        class_weights_(weights_of_classes(set, split.train, options.balance)),
        model_(seeded_model()),
        ddp_(model_, group),
        optimizer_(model_->parameters(),
                   torch::optim::AdamWOptions(options.run.lr).weight_decay(options.run.weight_decay)),
        sampler_(set, split.train, class_weights_, options.balance, options.run.seed, group),
        batch_size_(options.run.batch_size),
        updates_(updates_of(sampler_.num_samples())),
        scheduler_(optimizer_, schedule(), {.scaling = options.run.lr_scaling, .world_size = group.world_size()}),
        scaler_(group, {.enabled = amp_ == at::kHalf}),
        metrics_(static_cast<std::int64_t>(set.class_names.size())) {}

  void run() {
    if (!options_.run.save_dir.empty()) open_folder();
    if (speaks() && !options_.run.json) print_header();
    while (info_.epoch < options_.run.epochs && !is_out_of_steps()) {
      if (!train_epoch()) break;
    }
    if (checkpoint_) checkpoint_->wait();
    if (is_stopped_) {
      if (speaks()) ddpkit::train::log_line("video: " + stop_.describe(info_.step, checkpoint_.has_value()));
      return;
    }
    if (best_.epoch() == 0) best_.update(info_.epoch, evaluate());
    if (!speaks()) return;
    if (!options_.run.json) print_line(ddpkit::train::confusion_table(best_.result(), set_.class_names));
    print_line(fmt::format("best macro F1 {:.3f} (epoch {})", best_.result().macro_f1(), best_.epoch()));
  }

 private:
  bool speaks() const { return group_.rank() == 0; }
  bool is_out_of_steps() const { return options_.run.max_steps && info_.step >= *options_.run.max_steps; }

  // Returns the updates that `clips` of this rank make.
  std::int64_t updates_of(std::size_t clips) const {
    return (static_cast<std::int64_t>(clips) + batch_size_ - 1) / batch_size_;
  }

  std::shared_ptr<Classifier> seeded_model() const {
    torch::manual_seed(options_.run.seed);
    auto model =
        std::make_shared<Classifier>(ModelOptions{.classes = static_cast<std::int64_t>(set_.class_names.size()),
                                                  .dropout = options_.dropout,
                                                  .width = options_.width});
    model->to(group_.device());
    if (options_.run.sync_batchnorm) ddpkit::convert_sync_batchnorm(model, group_);
    return model;
  }

  ddpkit::optim::Schedule schedule() const {
    const ddpkit::optim::Schedule decay = ddpkit::optim::cosine_decay(updates_ * options_.run.epochs);
    if (options_.run.warmup_epochs == 0) return decay;
    // The warm-up begins at the rate for one rank (Goyal et al., arXiv 1706.02677).
    const double scale = ddpkit::optim::learning_rate_scale(options_.run.lr_scaling, group_.world_size());
    const auto updates = static_cast<std::int64_t>(static_cast<double>(updates_) * options_.run.warmup_epochs);
    return decay * ddpkit::optim::warmup(updates, scale > 1 ? 1 / scale : 1.0 / 3);
  }

  const char* amp_name() const { return amp_ == at::kFloat ? "off" : amp_ == at::kHalf ? "float16" : "bfloat16"; }

  std::string config() const {
    nlohmann::json config = nlohmann::json::parse(declared_.resolved());
    config.update({{"program", "video"},
                   {"data_set", std::filesystem::weakly_canonical(set_.folder).filename().string()},
                   {"training_trials", split_.train.size()},
                   {"validation_trials", split_.validation.size()},
                   {"class_names", set_.class_names},
                   {"precision", amp_name()},
                   {"world_size", group_.world_size()}});
    return ddpkit::train::json_text(config);
  }

  std::vector<ddpkit::train::CheckpointPart> parts() {
    return {ddpkit::train::checkpoint_part("scheduler", scheduler_), ddpkit::train::checkpoint_part("scaler", scaler_),
            ddpkit::train::checkpoint_part("best", best_), ddpkit::train::checkpoint_part("sampler", sampler_),
            ddpkit::train::checkpoint_part("metrics", metrics_, /*of_each_rank=*/true)};
  }

  void open_folder() {
    folder_ = ddpkit::train::open_run_folder(options_.run, declared_, config(), {"world_size"}, group_);
    checkpoint_.emplace(folder_.checkpoint, group_,
                        ddpkit::train::CheckpointOptions{.keep = options_.run.save_total_limit});
    if (folder_.to_resume) {
      info_ = checkpoint_->load(*model_, optimizer_, parts());
      // On another number of ranks an epoch has another number of updates. The schedule continues from the same
      // fraction of the run.
      sampler_.set_epoch(info_.epoch);
      scheduler_.set_step((info_.epoch + 1) * updates_ - updates_of(sampler_.trials().size()));
    }
    ddpkit::train::open_summary(summary_, options_.run, folder_, config(), info_.step, group_);
  }

  void save(bool is_best) {
    if (!checkpoint_) return;
    info_.config = config();
    checkpoint_->save(*model_, optimizer_, info_, parts(), is_best);
  }

  void print_header() const {
    std::int64_t parameters = 0;
    for (const at::Tensor& parameter : model_->parameters()) parameters += parameter.numel();
    print_line(fmt::format("{}: {} trials, {} classes, clips of {} frames of {}", set_.folder.string(),
                           set_.trials.size(), set_.class_names.size(), options_.frames, declared_.text("size")));
    print_line(class_table(set_, split_, class_weights_));
    print_line(
        fmt::format("3D-CNN with {} parameters, batch {} on each of {} rank{} ({}, {}), lr {:.4g}, balance {}, mixed "
                    "precision {}",
                    parameters, batch_size_, group_.world_size(), group_.world_size() == 1 ? "" : "s",
                    group_.backend_name(), group_.device().str(),
                    options_.run.lr * ddpkit::optim::learning_rate_scale(options_.run.lr_scaling, group_.world_size()),
                    declared_.text("balance"), amp_name()));
    if (folder_.to_resume)
      print_line(
          fmt::format("resumed from {}, epoch {}, step {}", folder_.checkpoint.string(), info_.epoch, info_.step));
  }

  ddpkit::Prefetcher<Clips> load(const std::vector<std::size_t>& trials, std::int64_t batch,
                                 std::optional<Variation> variation) const {
    const auto all = static_cast<std::int64_t>(trials.size());
    return {(all + batch - 1) / batch,
            [this, &trials, batch, all, variation](std::int64_t number) {
              const std::vector<std::size_t> some(trials.begin() + number * batch,
                                                  trials.begin() + std::min(all, (number + 1) * batch));
              return load_clips(set_, some, loader_, variation, options_.repeat_frame);
            },
            {.num_workers = options_.run.num_workers, .prefetch_factor = options_.prefetch_factor}};
  }

  // Returns false if the run reached its last step before the end of the epoch.
  bool train_epoch() {
    sampler_.set_epoch(info_.epoch);
    const std::vector<std::size_t> order = sampler_.trials();
    // A run that resumes within an epoch also restores its sums, if the number of ranks is the same.
    if (ddpkit::train::seed_epoch(options_.run.seed, info_.epoch, group_.rank()))
      metrics_ = ClassificationMetrics(static_cast<std::int64_t>(set_.class_names.size()));
    model_->train();
    const auto samples = static_cast<std::int64_t>(order.size());
    const std::int64_t updates = updates_of(order.size());
    ddpkit::Prefetcher<Clips> loader = load(
        order, batch_size_, Variation{.seed = options_.run.seed, .epoch = info_.epoch, .augment = options_.augment});
    ddpkit::train::ProgressBar bar(
        updates, ddpkit::train::progress_options(
                     options_.run, fmt::format("Epoch {}/{} Training", info_.epoch + 1, options_.run.epochs), "clips",
                     static_cast<double>(samples) / static_cast<double>(updates) * group_.world_size(), group_));
    double lr = 0;
    const auto start = std::chrono::steady_clock::now();
    std::int64_t update = 0;
    const auto save_within_epoch = [&](std::int64_t updates_done) {
      sampler_.set_position(static_cast<std::size_t>(updates_done * batch_size_));
      save(false);
    };
    for (; update < updates && !is_out_of_steps() && !(is_stopped_ = stop_.requested()); ++update) {
      ddpkit::set_step(info_.step);
      lr = scheduler_.learning_rates().front();
      const at::Tensor loss = train_step(*loader.next());
      ++info_.step;
      bar.advance([&] { return fmt::format("loss={:.4f}", loss.item<double>()); });
      if (update + 1 < updates && options_.run.save_steps > 0 && info_.step % options_.run.save_steps == 0)
        save_within_epoch(update + 1);
    }
    // Without a new update, the last checkpoint is already current.
    if (is_stopped_ && update > 0) save_within_epoch(update);
    const ClassificationResult train = metrics_.reduce(group_);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    const double waited = loader.stats().wait_seconds;
    bar.clear();
    if (is_stopped_) return false;
    if (!std::isfinite(train.loss))
      throw ddpkit::Error(
          fmt::format("the loss became {} in epoch {}: lower --lr ({})", train.loss, info_.epoch + 1, options_.run.lr),
          {.rank = 0});
    if (update < updates) return false;
    ++info_.epoch;
    sampler_.set_epoch(info_.epoch);
    const ClassificationResult validation = evaluate();
    const bool is_best = best_.update(info_.epoch, validation);
    save(is_best);
    const Epoch epoch{.epoch = info_.epoch,
                      .epochs = options_.run.epochs,
                      .step = info_.step,
                      .world_size = group_.world_size(),
                      .lr = lr,
                      .clips = samples * group_.world_size(),
                      .seconds = elapsed.count(),
                      .wait_seconds = waited,
                      .peak_memory_bytes = ddpkit::train::peak_memory_of_ranks(group_),
                      .train = train,
                      .validation = validation,
                      .is_best = is_best};
    if (speaks()) print_line(options_.run.json ? as_json(epoch) : as_line(epoch));
    if (speaks() && is_best && checkpoint_ && !options_.run.json)
      print_line(fmt::format("  {} Saved best model: best.pt (F1: {:.4f})", ddpkit::train::has_utf8() ? "✓" : "*",
                             validation.macro_f1()));
    if (summary_) write_to(*summary_, epoch);
    return true;
  }

  at::Tensor train_step(const Clips& clips) {
    optimizer_.zero_grad();
    const at::Tensor labels = clips.labels.to(group_.device());
    at::Tensor loss;
    {
      const ddpkit::optim::Autocast autocast(group_.device(), amp_ == at::kFloat ? at::kBFloat16 : amp_,
                                             {.enabled = amp_ != at::kFloat});
      const at::Tensor logits =
          ddp_(prepare_clips(clips.pixels.to(group_.device()), clips.augmentations)).to(at::kFloat);
      metrics_.add_predictions(logits, labels);
      const at::Tensor each = torch::nn::functional::cross_entropy(
          logits, labels, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
      // Divides by the number of clips, not by the sum of their weights. So the mean over the ranks equals that of the
      // joined batch.
      if (options_.balance == Balance::kLoss)
        loss = (each * at::tensor(class_weights_, each.options()).index_select(0, labels)).mean();
      else
        loss = each.mean();
    }
    scaler_.scale(loss).backward();
    metrics_.add_loss(loss, clips.size());
    scaler_.step(optimizer_);
    scaler_.update();
    scheduler_.step();
    return loss.detach();
  }

  // Evaluates each validation trial once, each on one rank.
  ClassificationResult evaluate() {
    const torch::NoGradGuard no_grad;
    // The statistics of batch normalisation differ between ranks. All ranks evaluate with those of rank 0, which the
    // checkpoint holds.
    for (const at::Tensor& buffer : model_->buffers()) group_.broadcast(buffer);
    model_->eval();
    ClassificationMetrics metrics(static_cast<std::int64_t>(set_.class_names.size()));
    const auto share = ddpkit::train::evaluation_share(static_cast<std::int64_t>(split_.validation.size()),
                                                       group_.rank(), group_.world_size());
    const std::vector<std::size_t> mine(split_.validation.begin() + share.begin, split_.validation.begin() + share.end);
    ddpkit::Prefetcher<Clips> loader = load(mine, batch_size_, std::nullopt);
    while (const auto clips = loader.next()) {
      const at::Tensor labels = clips->labels.to(group_.device());
      const at::Tensor logits = model_->forward(prepare_clips(clips->pixels.to(group_.device()), {}));
      metrics.add(logits, labels, torch::cross_entropy_loss(logits, labels));
    }
    return metrics.reduce(group_);
  }

  const TrainOptions& options_;
  const ddpkit::train::Options& declared_;
  const TrialSet& set_;
  const TrialSplit& split_;
  ClipLoader& loader_;
  ddpkit::ProcessGroup group_;
  at::ScalarType amp_;
  std::vector<double> class_weights_;  // [class]
  std::shared_ptr<Classifier> model_;
  ddpkit::DistributedDataParallel<Classifier> ddp_;
  ddpkit::optim::FusedAdamW optimizer_;
  TrialSampler sampler_;
  std::int64_t batch_size_;
  std::int64_t updates_;  // Per epoch.
  ddpkit::optim::LearningRateScheduler scheduler_;
  ddpkit::optim::GradScaler scaler_;
  ClassificationMetrics metrics_;  // Of the current epoch.
  Best best_;
  ddpkit::train::RunFolder folder_;
  std::optional<ddpkit::train::Checkpoint> checkpoint_;
  ddpkit::train::CheckpointInfo info_;  // The progress of the run.
  std::optional<ddpkit::train::SummaryWriter> summary_;
  ddpkit::train::StopSignal stop_{group_};
  bool is_stopped_ = false;
};

}  // namespace

void train(const TrainOptions& options, const ddpkit::train::Options& declared, ddpkit::train::Program& program) {
  const ddpkit::ProcessGroup group = program.init_process_group({.backend = options.run.backend});
  const std::filesystem::path folder = ddpkit::train::data_folder(
      options.data, "data/mouse", [](const std::string& path) { generate(path, {}); }, group);
  DataFaults faults(trials_file(folder), options.on_bad_data);
  TrialSet set;
  std::optional<ClipLoader> loader;
  ddpkit::train::run_together(group, [&] {
    set = read_trials(folder, options.classes, options.frames, faults);
    // The ranks of a host share one cache and its limit.
    loader.emplace(folder, ClipLoaderOptions{.size = options.size,
                                             .frames = options.frames,
                                             .open_videos = options.open_videos,
                                             .cache_dir = options.cache_dir,
                                             .cache_bytes = std::int64_t{options.cache_mb} << 20,
                                             .processes = ddpkit::read_launch_environment().local_world_size});
  });
  check_trials(set, *loader, {.depth = options.check, .num_workers = std::max(1, options.run.num_workers)}, group,
               faults);
  if (const std::string summary = faults.summary(); group.rank() == 0 && !summary.empty())
    ddpkit::train::log_line(summary);
  const TrialSplit split = split_by_video(set, options.validation_share, options.run.seed);
  Trainer(options, declared, set, split, *loader, group).run();
  if (const std::string summary = faults.summary(0); group.rank() == 0 && !summary.empty() && !options.run.json)
    print_line(summary);
}

}  // namespace video
