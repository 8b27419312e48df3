#include "video/trainer.h"

#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <set>

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

using ddpkit::train::ClassificationMetrics;
using ddpkit::train::ClassificationResult;

class Trainer {
 public:
  Trainer(const TrainOptions& options, const TrialSet& set, const TrialSplit& split, ClipLoader& loader,
          const ddpkit::ProcessGroup& group, ddpkit::train::Run& run)
      : options_(options),
        set_(set),
        split_(split),
        loader_(loader),
        group_(group),
        run_(run),
        class_weights_(weights_of_classes(set, split.train, options.balance)),
        share_(ddpkit::train::evaluation_share(static_cast<std::int64_t>(split.validation.size()), group.rank(),
                                               group.world_size())),
        sampler_(set, split.train, class_weights_, options.balance, options.run.seed, group),
        batch_size_(options.run.batch_size),
        updates_(updates_of(sampler_.num_samples())),
        model_(make_model()),
        ddp_(model_, group),
        optimizer_(model_->parameters(),
                   torch::optim::AdamWOptions(options.run.lr).weight_decay(options.run.weight_decay)),
        metrics_(static_cast<std::int64_t>(set.class_names.size())) {}

  void run() {
    run_.start(
        {.model = *model_,
         .optimizer = optimizer_,
         .wrapper = &ddp_,
         .model_name = "3D-CNN",
         .optimizer_name = "adamw",
         .updates_per_epoch = updates_,
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
    while (run_.has_epoch() && train_epoch()) {
    }
    if (!run_.finish()) return;
    if (best_.epoch() == 0) best_.update(run_.epoch(), evaluate());
    run_.print(ddpkit::train::confusion_table(best_.result(), set_.class_names));
    run_.print_summary(fmt::format("best macro F1 {:.3f} (epoch {})", best_.result().macro_f1(), best_.epoch()));
  }

 private:
  // Returns the updates that `clips` of this rank make.
  std::int64_t updates_of(std::size_t clips) const {
    return (static_cast<std::int64_t>(clips) + batch_size_ - 1) / batch_size_;
  }

  std::shared_ptr<Classifier> make_model() const {
    run_.print(class_table(set_, split_.train, class_weights_));
    run_.print_batches(updates_, updates_of(static_cast<std::size_t>(share_.size())));
    auto model = run_.make_model([&] {
      return std::make_shared<Classifier>(ModelOptions{.classes = static_cast<std::int64_t>(set_.class_names.size()),
                                                       .dropout = options_.dropout,
                                                       .width = options_.width});
    });
    if (options_.run.sync_batchnorm) ddpkit::convert_sync_batchnorm(model, group_);
    return model;
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
      train_step(clips);
      sampler_.set_position(used += static_cast<std::size_t>(clips.size()));
      epoch.advance([&] { return metrics_.note(); });
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
                  {"wait_seconds", wait_seconds}},
                 {{"loss/train", train.loss},
                  {"loss/validation", validation.loss},
                  {"accuracy/train", train.accuracy},
                  {"accuracy/validation", validation.accuracy},
                  {"f1/validation", validation.macro_f1()},
                  {"training/clips_per_second", epoch.items_per_second()}});
    if (is_best) run_.print_best(fmt::format("F1: {:.4f}", validation.macro_f1()));
    run_.write_file("confusion.svg", ddpkit::train::confusion_svg(validation, set_.class_names));
  }

  void train_step(const Clips& clips) {
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
  }

  // Evaluates each validation trial once, each on one rank.
  ClassificationResult evaluate() {
    const ddpkit::train::EvaluationScope scope(*model_, group_);
    ClassificationMetrics metrics(static_cast<std::int64_t>(set_.class_names.size()));
    const std::vector<std::size_t> mine(split_.validation.begin() + share_.begin,
                                        split_.validation.begin() + share_.end);
    ddpkit::train::ProgressBar bar =
        run_.bar(run_.epoch(), "Validation", updates_of(static_cast<std::size_t>(share_.size())));
    ddpkit::Prefetcher<Clips> loader = load(mine, batch_size_, std::nullopt);
    while (const auto clips = loader.next()) {
      const at::Tensor labels = clips->labels.to(group_.device());
      const at::Tensor logits = model_->forward(prepare_clips(clips->pixels.to(group_.device()), {}));
      metrics.add(logits, labels, torch::cross_entropy_loss(logits, labels));
      bar.advance();
    }
    return metrics.reduce(group_);
  }

  const TrainOptions& options_;
  const TrialSet& set_;
  const TrialSplit& split_;
  ClipLoader& loader_;
  ddpkit::ProcessGroup group_;
  ddpkit::train::Run& run_;
  std::vector<double> class_weights_;  // [class]
  ddpkit::train::IndexRange share_;    // Validation trials of this rank.
  TrialSampler sampler_;
  std::int64_t batch_size_;
  std::int64_t updates_;  // Per epoch.
  std::shared_ptr<Classifier> model_;
  ddpkit::DistributedDataParallel<Classifier> ddp_;
  ddpkit::optim::FusedAdamW optimizer_;
  ClassificationMetrics metrics_;  // Of the current epoch.
  Best best_;
};

}  // namespace

void train(TrainOptions& options, const ddpkit::train::Options& declared, ddpkit::train::Program& program) {
  const ddpkit::ProcessGroup group = program.join(options.run);
  // 128 clips of 256x256 need about 26 GB.
  if (group.device().is_cpu() && !declared.is_given("batch_size")) options.run.batch_size = 8;
  ddpkit::train::Run run(options.run, declared, group);
  run.print("Loading data...");
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
  std::set<std::string> videos;
  for (const Trial& trial : set.trials) videos.insert(trial.video);
  run.print(fmt::format("Found {} unique videos with {} total trials", videos.size(), set.trials.size()));
  run.print(fmt::format("Train trials: {}, Val trials: {}", split.train.size(), split.validation.size()));
  Trainer(options, set, split, *loader, group, run).run();
  if (const std::string summary = faults.summary(0); !summary.empty()) run.print(summary);
}

}  // namespace video
