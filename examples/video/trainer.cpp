#include "video/trainer.h"

#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include <fmt/format.h>

#include <ddpkit/ddpkit.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/run.h>
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

ddpkit::PrefetcherOptions loader_options(const TrainOptions& options) {
  return {.num_workers = options.run.num_workers, .prefetch_factor = options.prefetch_factor};
}

struct Data {
  TrialSet set;
  TrialSplit split;
  std::optional<ClipLoader> loader;
  std::vector<double> class_weights;  // [class]

  std::int64_t classes() const { return static_cast<std::int64_t>(set.class_names.size()); }
};

void read_data(Data& data, const std::string& folder, const TrainOptions& options, const ddpkit::ProcessGroup& group,
               const ddpkit::train::Run& run, DataFaults& faults) {
  ddpkit::train::run_together(group, [&] {
    data.set = read_trials(folder, options.classes, options.frames, faults);
    // The ranks of a host share one cache and its limit.
    data.loader.emplace(folder, ClipLoaderOptions{.size = options.size,
                                                  .frames = options.frames,
                                                  .open_videos = options.open_videos,
                                                  .cache_dir = options.cache_dir,
                                                  .cache_bytes = std::int64_t{options.cache_mb} << 20,
                                                  .processes = ddpkit::read_launch_environment().local_world_size});
  });
  check_trials(data.set, *data.loader, {.depth = options.check, .num_workers = std::max(1, options.run.num_workers)},
               group, faults);
  if (const std::string summary = faults.summary(); group.rank() == 0 && !summary.empty())
    ddpkit::train::log_line(summary);
  data.split = split_by_video(data.set, options.validation_share, options.run.seed);
  data.class_weights = weights_of_classes(data.set, data.split.train, options.balance);
  std::set<std::string> videos;
  for (const Trial& trial : data.set.trials) videos.insert(trial.video);
  run.print(fmt::format("Found {} unique videos with {} total trials", videos.size(), data.set.trials.size()));
  run.print(fmt::format("Train trials: {}, Val trials: {}", data.split.train.size(), data.split.validation.size()));
  run.print(class_table(data.set, data.split.train, data.class_weights));
}

// Returns the mean over the clips, not over their weights: so the mean over the ranks equals that of the joined batch.
at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& labels, const Data& data, const TrainOptions& options) {
  const at::Tensor each = torch::nn::functional::cross_entropy(
      logits, labels, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
  if (options.balance != Balance::kLoss) return each.mean();
  return (each * at::tensor(data.class_weights, each.options()).index_select(0, labels)).mean();
}

// The validation trials of this rank.
std::vector<std::size_t> validation_trials(const Data& data, const ddpkit::ProcessGroup& group) {
  const std::vector<std::size_t>& all = data.split.validation;
  const auto share =
      ddpkit::train::evaluation_share(static_cast<std::int64_t>(all.size()), group.rank(), group.world_size());
  return {all.begin() + share.begin, all.begin() + share.end};
}

// Evaluates each validation trial once, on one rank.
ClassificationResult evaluate(Classifier& model, Data& data, const TrainOptions& options,
                              const ddpkit::ProcessGroup& group, const ddpkit::train::Run& run) {
  const std::vector<std::size_t> trials = validation_trials(data, group);
  const ddpkit::train::EvaluationScope scope(model, group);
  ClassificationMetrics metrics(data.classes());
  const auto size = static_cast<std::ptrdiff_t>(options.run.batch_size);
  const auto make_clips = [&](std::int64_t number) {
    const auto begin = trials.begin() + number * size;
    return load_clips(data.set, {begin, begin + std::min(size, trials.end() - begin)}, *data.loader, std::nullopt,
                      options.repeat_frame);
  };
  ddpkit::Prefetcher<Clips> loader(run.batches_of(trials.size()), make_clips, loader_options(options));
  ddpkit::train::ProgressBar bar = run.bar(run.epoch(), "Validation", run.batches_of(trials.size()));
  while (const auto clips = loader.next()) {
    const at::Tensor labels = clips->labels.to(group.device());
    const at::Tensor logits = model.forward(prepare_clips(clips->pixels.to(group.device()), {}));
    metrics.add(logits, labels, torch::cross_entropy_loss(logits, labels));
    bar.advance();
  }
  return metrics.reduce(group);
}

}  // namespace

void train(TrainOptions& options, const ddpkit::train::Options& declared, ddpkit::train::Program& program) {
  const ddpkit::ProcessGroup group = program.join(options.run);
  // 128 clips of 256x256 need about 26 GB.
  if (group.device().is_cpu() && !declared.is_given("batch_size")) options.run.batch_size = 8;
  ddpkit::train::Run run(options.run, declared, group);
  run.print("Loading data...");
  const std::string folder = ddpkit::train::data_folder(
      options.data, "data/mouse", [](const std::string& path) { generate(path, {}); }, group);
  DataFaults faults(trials_file(folder), options.on_bad_data);
  Data data;
  read_data(data, folder, options, group, run, faults);
  ddpkit::ResumableSampler sampler =
      make_sampler(data.set, data.split.train, data.class_weights, options.balance, options.run.seed, group);
  run.print_batches(run.batches_of(sampler.num_samples()), run.batches_of(validation_trials(data, group).size()));
  const auto model = run.make_model([&] {
    return std::make_shared<Classifier>(
        ModelOptions{.classes = data.classes(), .dropout = options.dropout, .width = options.width});
  });
  if (options.run.sync_batchnorm) ddpkit::convert_sync_batchnorm(model, group);
  ddpkit::DistributedDataParallel<Classifier> ddp(model, group);
  ddpkit::optim::FusedAdamW optimizer(
      model->parameters(), torch::optim::AdamWOptions(options.run.lr).weight_decay(options.run.weight_decay));
  ClassificationMetrics metrics(data.classes());  // Of the current epoch.
  Best best;
  run.start({.model = *model,
             .optimizer = optimizer,
             .wrapper = &ddp,
             .model_name = "3D-CNN",
             .optimizer_name = "adamw",
             .sampler = &sampler,
             .state = {ddpkit::train::checkpoint_part("best", best),
                       ddpkit::train::checkpoint_part("metrics", metrics, /*of_each_rank=*/true)}},
            {{"data_set", std::filesystem::weakly_canonical(folder).filename().string()},
             {"training_trials", data.split.train.size()},
             {"validation_trials", data.split.validation.size()},
             {"class_names", data.set.class_names}});

  while (run.has_epoch()) {
    const Variation variation{.seed = options.run.seed, .epoch = run.epoch(), .augment = options.augment};
    ddpkit::train::Epoch epoch(run, "clips");
    if (epoch.is_new()) metrics = ClassificationMetrics(data.classes());
    const auto make_clips = [&](std::int64_t number) {
      std::vector<std::size_t> trials;
      for (const std::int64_t place : epoch.batch(number))
        trials.push_back(data.split.train[static_cast<std::size_t>(place)]);
      return load_clips(data.set, trials, *data.loader, variation, options.repeat_frame);
    };
    ClassificationResult trained, validated;
    double wait_seconds = 0;
    epoch.retry([&] {
      ddpkit::Prefetcher<Clips> loader(epoch.batches(), make_clips, loader_options(options));
      model->train();
      while (epoch.next()) {
        const Clips clips = *loader.next();
        const at::Tensor labels = clips.labels.to(group.device());
        optimizer.zero_grad();
        at::Tensor logits, loss;
        {
          const ddpkit::optim::Autocast autocast = run.autocast(group.device());
          logits = ddp(prepare_clips(clips.pixels.to(group.device()), clips.augmentations)).to(at::kFloat);
          loss = loss_of(logits, labels, data, options);
        }
        run.scaler().scale(loss).backward();
        run.step_optimizer();
        metrics.add(logits.detach(), labels, loss.detach());
        epoch.advance([&] { return metrics.note(); });
      }
      trained = metrics.reduce(group);
      wait_seconds = loader.stats().wait_seconds;
    });
    if (!epoch.finish(trained.loss)) break;
    run.retry([&] { validated = evaluate(*model, data, options, group, run); });
    const bool is_best = best.update(run.epoch(), validated);
    run.save(is_best);
    epoch.report(trained, validated, "validation", "Val", data.set.class_names,
                 fmt::format("{:.1f} s, {:.1f} clips/s, waited {:.0f}%", epoch.seconds(), epoch.items_per_second(),
                             100 * wait_seconds / epoch.seconds()),
                 {{"validation_clips", validated.samples}, {"best", is_best}, {"wait_seconds", wait_seconds}});
    if (is_best) run.print_best(fmt::format("F1: {:.4f}", validated.macro_f1()));
  }
  if (run.finish()) {
    if (best.epoch() == 0) run.retry([&] { best.update(run.epoch(), evaluate(*model, data, options, group, run)); });
    run.print(ddpkit::train::confusion_table(best.result(), data.set.class_names));
    run.print_summary(fmt::format("best macro F1 {:.3f} (epoch {})", best.result().macro_f1(), best.epoch()));
  }
  if (const std::string summary = faults.summary(0); !summary.empty()) run.print(summary);
}

}  // namespace video
