#include "video/trainer.h"

#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <optional>

#include <fmt/format.h>

#include <ddpkit/ddpkit.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/run.h>
#include <ddpkit/train/seed.h>
#include <ddpkit/train/text.h>
#include <ddpkit/train/together.h>

#include "video/balance.h"
#include "video/best.h"
#include "video/clips.h"
#include "video/model.h"

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
        run_(options.run, declared, group),
        class_weights_(weights_of_classes(set, split.train, options.balance)),
        model_(seeded_model()),
        ddp_(model_, group),
        optimizer_(model_->parameters(),
                   torch::optim::AdamWOptions(options.run.lr).weight_decay(options.run.weight_decay)),
        sampler_(set, split.train, class_weights_, options.balance, options.run.seed, group),
        batch_size_(options.run.batch_size),
        updates_(updates_of(sampler_.num_samples())),
        metrics_(static_cast<std::int64_t>(set.class_names.size())) {}

  void run() {
    run_.start(
        {.model = *model_,
         .optimizer = optimizer_,
         .updates_per_epoch = updates_,
         .devices = group_.world_size(),
         .state = {ddpkit::train::checkpoint_part("best", best_), ddpkit::train::checkpoint_part("sampler", sampler_),
                   ddpkit::train::checkpoint_part("metrics", metrics_, /*of_each_rank=*/true)}},
        {{"data_set", std::filesystem::weakly_canonical(set_.folder).filename().string()},
         {"training_trials", split_.train.size()},
         {"validation_trials", split_.validation.size()},
         {"class_names", set_.class_names}});
    if (run_.is_resumed()) {
      // On another number of ranks an epoch has another number of updates. The schedule continues from the same
      // fraction of the run.
      sampler_.set_epoch(run_.epoch());
      run_.scheduler().set_step((run_.epoch() + 1) * updates_ - updates_of(sampler_.trials().size()));
    }
    if (run_.prints()) print_header();
    while (run_.has_epoch() && train_epoch()) {
    }
    if (!run_.finish()) return;
    if (best_.epoch() == 0) best_.update(run_.epoch(), evaluate());
    if (run_.prints()) print_line(ddpkit::train::confusion_table(best_.result(), set_.class_names));
    if (run_.is_main())
      print_line(fmt::format("best macro F1 {:.3f} (epoch {})", best_.result().macro_f1(), best_.epoch()));
  }

 private:
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
                    declared_.text("balance"), run_.precision_name()));
    run_.print_resumed(fmt::format("epoch {}, step {}", run_.epoch(), run_.step()));
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

  // Returns false if the epoch is not complete: see Epoch::next().
  bool train_epoch() {
    sampler_.set_epoch(run_.epoch());
    const std::vector<std::size_t> order = sampler_.trials();
    // A run that resumes within an epoch also restores its sums, if the number of ranks is the same.
    if (ddpkit::train::seed_epoch(options_.run.seed, run_.epoch(), group_.rank()))
      metrics_ = ClassificationMetrics(static_cast<std::int64_t>(set_.class_names.size()));
    model_->train();
    ddpkit::Prefetcher<Clips> loader = load(
        order, batch_size_, Variation{.seed = options_.run.seed, .epoch = run_.epoch(), .augment = options_.augment});
    ddpkit::train::Epoch epoch(run_, updates_of(order.size()),
                               static_cast<std::int64_t>(order.size()) * group_.world_size(), "clips");
    std::size_t used = 0;
    while (epoch.next()) {
      const Clips clips = *loader.next();
      const at::Tensor loss = train_step(clips);
      sampler_.set_position(used += static_cast<std::size_t>(clips.size()));
      epoch.advance([&] { return fmt::format("loss={:.4f}", loss.item<double>()); });
    }
    const ClassificationResult train = metrics_.reduce(group_);
    if (!epoch.finish(train.loss)) return false;
    sampler_.set_epoch(run_.epoch());
    const ClassificationResult validation = evaluate();
    const bool is_best = best_.update(run_.epoch(), validation);
    run_.save(is_best);
    report(epoch, train, validation, is_best, loader.stats().wait_seconds);
    return true;
  }

  void report(ddpkit::train::Epoch& epoch, const ClassificationResult& train, const ClassificationResult& validation,
              bool is_best, double wait_seconds) {
    epoch.report(fmt::format("Train {} | Val {}, F1: {:.4f} | {:.1f} s, {:.1f} clips/s, waited {:.0f}%", train.line(),
                             validation.line(), validation.macro_f1(), epoch.seconds(), epoch.items_per_second(),
                             100 * wait_seconds / epoch.seconds()),
                 {{"train_loss", train.loss},
                  {"train_accuracy", train.accuracy},
                  {"validation_loss", validation.loss},
                  {"validation_accuracy", validation.accuracy},
                  {"validation_macro_f1", validation.macro_f1()},
                  {"validation_f1", validation.f1()},
                  {"validation_confusion", validation.confusion},
                  {"validation_clips", validation.samples},
                  {"best", is_best},
                  {"clips_per_second", epoch.items_per_second()},
                  {"seconds", epoch.seconds()},
                  {"wait_seconds", wait_seconds},
                  {"peak_memory_bytes", ddpkit::train::peak_memory_of_ranks(group_)},
                  {"world_size", group_.world_size()}},
                 {{"loss/train", train.loss},
                  {"loss/validation", validation.loss},
                  {"accuracy/train", train.accuracy},
                  {"accuracy/validation", validation.accuracy},
                  {"f1/validation", validation.macro_f1()},
                  {"training/clips_per_second", epoch.items_per_second()}});
    if (run_.prints() && is_best && run_.is_saved())
      print_line(fmt::format("  {} Saved best model: best.pt (F1: {:.4f})", ddpkit::train::has_utf8() ? "✓" : "*",
                             validation.macro_f1()));
  }

  at::Tensor train_step(const Clips& clips) {
    optimizer_.zero_grad();
    const at::Tensor labels = clips.labels.to(group_.device());
    at::Tensor loss;
    {
      const ddpkit::optim::Autocast autocast = run_.autocast(group_.device());
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
    run_.scaler().scale(loss).backward();
    metrics_.add_loss(loss, clips.size());
    run_.step_optimizer();
    return loss.detach();
  }

  // Evaluates each validation trial once, each on one rank.
  ClassificationResult evaluate() {
    const ddpkit::train::EvaluationScope scope(*model_, group_);
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
  ddpkit::train::Run run_;
  std::vector<double> class_weights_;  // [class]
  std::shared_ptr<Classifier> model_;
  ddpkit::DistributedDataParallel<Classifier> ddp_;
  ddpkit::optim::FusedAdamW optimizer_;
  TrialSampler sampler_;
  std::int64_t batch_size_;
  std::int64_t updates_;           // Per epoch.
  ClassificationMetrics metrics_;  // Of the current epoch.
  Best best_;
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
