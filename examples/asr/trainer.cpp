#include "asr/trainer.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include <fmt/format.h>

#include <ddpkit/data/length_bucketed_sampler.h>
#include <ddpkit/ddpkit.h>
#include <ddpkit/train/main.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/run.h>
#include <ddpkit/train/text.h>
#include <ddpkit/train/together.h>

#include "asr/evaluation.h"
#include "asr/faults.h"
#include "asr/trained_model.h"

namespace asr {
namespace {

using ddpkit::train::print_line;

using Clock = std::chrono::steady_clock;
using ddpkit::train::UsageError;

// Measurements of an epoch on this rank, since this process started the epoch.
struct Measured {
  ddpkit::LengthBalance balance;
  double audio_seconds = 0;               // That this rank has trained on.
  double wait_seconds = 0;                // In which the steps waited for data.
  double exposed_us = 0;                  // From backward's last gradient to the end of the reduction.
  std::vector<double> step_seconds = {};  // Waiting for data, forward, backward and update. [step]

  double median_step_seconds() {
    if (step_seconds.empty()) return 0;
    const auto middle = step_seconds.begin() + static_cast<std::ptrdiff_t>(step_seconds.size() / 2);
    std::nth_element(step_seconds.begin(), middle, step_seconds.end());
    return *middle;
  }
};

class Trainer {
 public:
  Trainer(const Options& options, const ddpkit::ProcessGroup& group, ddpkit::train::Run& run)
      : options_(options),
        group_(group),
        run_(run),
        model_(run.make_model([&] { return std::make_shared<Recognizer>(model_options(options)); })),
        faults_(options.data.on_bad_data),
        train_(open_dataset(options.data.train, options, *model_, faults_, group)),
        sampler_(train_->lengths(), group,
                 {.batch_size = static_cast<std::size_t>(options.run.batch_size), .seed = options.run.seed}),
        ddp_(converted(), group,
             {.find_unused_parameters = options.find_unused_parameters,
              .parameters_to_ignore = {"feature_mean", "feature_deviation"},
              .arena = options.arena_mb > 0,
              .arena_mb =
                  options.arena_mb > 0 ? std::optional<double>(static_cast<double>(options.arena_mb)) : std::nullopt}),
        optimizer_(model_->parameters(),
                   torch::optim::AdamWOptions(options.run.lr).weight_decay(options.run.weight_decay)) {
    if (!options.data.dev.empty()) dev_ = open_dataset(options.data.dev, options, *model_, faults_, group);
    run_.print(fmt::format("Train utterances: {} ({:.1f} min), dev utterances: {}", train_->size(),
                           train_->seconds() / 60, dev_ ? dev_->size() : 0));
    run_.print(fmt::format("Train batches: {}", sampler_.num_batches()));
    run_.print_batches(0, 0, "", static_cast<double>(options.run.batch_size) / group.world_size());
  }

  void run() {
    run_.start({.model = *model_,
                .optimizer = optimizer_,
                .wrapper = &ddp_,
                .model_name = "LMU",
                .optimizer_name = "adamw",
                .batches = &sampler_,
                .most_warmup_start = 1.0 / 3,
                .state = {ddpkit::train::checkpoint_part("loss", loss_, /*of_each_rank=*/true),
                          ddpkit::train::checkpoint_part("features", features_, /*of_each_rank=*/true)}},
               {{"train_utterances", train_->size()}});
    while (run_.has_epoch()) {
      const bool is_whole = train_epoch();
      if (is_whole || (!run_.is_stopped() && options_.run.save_steps > 0)) run_.save();
      if (!is_whole) break;
    }
    if (!run_.finish()) return;
    std::array<std::size_t, kFaults> faults;
    run_.retry([&] { faults = faults_.count(group_); });
    for (const Sample& sample : samples_)
      run_.print(
          fmt::format("{}\n  reference:  {}\n  hypothesis: {}", sample.name, sample.reference, sample.hypothesis));
    run_.print_summary(describe(faults));
  }

 private:
  std::shared_ptr<Recognizer> converted() {
    if (options_.run.sync_batchnorm) ddpkit::convert_sync_batchnorm(model_, group_);
    return model_;
  }

  Augmentation augmentation() const {
    return {.spec_augment = options_.spec_augment ? std::optional(options_.spec) : std::nullopt,
            .noise_layers = options_.model.dropout > 0 ? options_.model.layers : 0,
            .noise_width = options_.model.width,
            .seed = options_.run.seed,
            .epoch = run_.epoch()};
  }

  // Returns false if the epoch is not complete: see Epoch::next().
  bool train_epoch() {
    ddpkit::train::Epoch epoch(run_, "utterances");
    if (sampler_.position() == 0) {
      loss_ = {};
      features_ = FeatureSums(options_.features.mels);
    }
    Measured measured;
    double train_loss = 0, audio_seconds = 0;  // Of all ranks.
    epoch.retry([&] {
      train_batches(epoch, measured);
      train_loss = loss_.reduce(group_);
      audio_seconds = ddpkit::train::sum_over_ranks({measured.audio_seconds}, group_).front();
    });
    measured.balance = sampler_.balance();
    if (!epoch.finish()) return false;
    if (run_.epoch() == 1) run_.retry([&] { set_feature_statistics(); });
    report(epoch, measured, train_loss, audio_seconds);
    return true;
  }

  // The rest of the epoch.
  void train_batches(ddpkit::train::Epoch& epoch, Measured& measured) {
    const std::size_t begin = sampler_.position();
    const auto& batches = sampler_.batches();
    sampler_.set_position(begin);
    const Augmentation augmentation = this->augmentation();
    model_->train();
    ddpkit::Prefetcher<Batch> loader(epoch.batches(),
                                     [&](std::int64_t number) {
                                       const auto& batch = batches[begin + static_cast<std::size_t>(number)];
                                       return train_->batch(batch.indices, batch.repeated, batch.batch_size,
                                                            augmentation);
                                     },
                                     {.num_workers = options_.run.num_workers});
    Clock::time_point step_began = Clock::now();
    while (epoch.next()) {
      const std::optional<Batch> batch = loader.next();
      const double loss = train_step(batch->to(group_.device()));
      if (run_.epoch() == 0) features_.add(batch->sums);
      for (const std::size_t index : batch->utterances)
        measured.audio_seconds += static_cast<double>((*train_)[index].frames) * options_.features.hop_ms / 1000;
      const auto& stats = ddp_.stats();
      measured.exposed_us += stats.end_us - stats.last_gradient_us;
      measured.step_seconds.push_back(std::chrono::duration<double>(Clock::now() - step_began).count());
      if (first_step_at_ == 0)
        first_step_at_ = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
      epoch.advance([&] { return fmt::format("loss={:.4f}", loss); });
      log_step(loss);
      step_began = Clock::now();
    }
    measured.wait_seconds += loader.stats().wait_seconds;
  }

  void set_feature_statistics() {
    const auto [mean, deviation] = features_.statistics(group_);
    const torch::NoGradGuard no_grad;
    model_->feature_mean.copy_(mean);
    model_->feature_deviation.copy_(deviation);
  }

  // Returns the loss on this rank's share. The sum over the ranks is the mean over the whole batch.
  double train_step(Batch batch) {
    while (true) {
      optimizer_.zero_grad();
      at::Tensor losses;
      {
        const ddpkit::optim::Autocast autocast = run_.autocast(group_.device());
        losses = ctc_losses(ddp_(batch.features, batch.noise), steps_of(*model_, batch), batch);
      }
      const at::Tensor sum = torch::dot(losses, batch.weights);
      // DistributedDataParallel computes the mean over ranks, but their shares may differ in size.
      run_.scaler()
          .scale(sum * (static_cast<double>(group_.world_size()) / static_cast<double>(batch.batch_size)))
          .backward();
      run_.scaler().unscale_(optimizer_);
      const double most = options_.run.max_grad_norm > 0 ? options_.run.max_grad_norm : HUGE_VAL;
      const double norm = ddpkit::optim::clip_grad_norm_(model_->parameters(), most);
      // The gradients and their norm are equal on all ranks, so all ranks take the same branch.
      if (std::isfinite(norm) || run_.scaler().is_enabled()) {
        run_.step_optimizer();
        const double loss = sum.item<double>();
        if (std::isfinite(loss)) loss_.add_sum(loss, batch.weights.sum().item<double>());
        return loss / static_cast<double>(batch.batch_size);
      }
      skip_faulty(batch, losses.detach());
    }
  }

  // Removes the utterances with a NaN or infinite loss from the batch, on all ranks. Collective.
  void skip_faulty(Batch& batch, const at::Tensor& losses) {
    std::vector<bool> keep;
    double bad = 0, good = 0;
    for (std::int64_t row = 0; row < batch.size(); ++row) {
      const bool counts = batch.weights[row].item<float>() > 0;
      keep.push_back(!counts || std::isfinite(losses[row].item<double>()));
      (keep.back() ? good : bad) += counts ? 1 : 0;
    }
    const std::vector<double> sums = ddpkit::train::sum_over_ranks({bad, good}, group_);
    const std::string advice = fmt::format("lower --lr ({}) or --max-grad-norm", options_.run.lr);
    if (sums[0] == 0 || (sums[1] == 0 && sums[0] > 1))
      throw ddpkit::Error(
          fmt::format("the {} became NaN or infinite in step {}: {}",
                      sums[0] == 0 ? "gradients, though no utterance's loss," : "loss of every utterance of the batch",
                      run_.step() + 1, advice),
          {.rank = 0});
    ddpkit::train::run_together(group_, [&] {
      for (std::int64_t row = 0; row < batch.size(); ++row) {
        if (keep[static_cast<std::size_t>(row)]) continue;
        const std::string file = (*train_)[batch.utterances[static_cast<std::size_t>(row)]].where();
        faults_.add(
            Fault::kNanLoss, file,
            fmt::format("{}: its loss became {} in step {}", file, losses[row].item<double>(), run_.step() + 1));
      }
    });
    batch = batch.keeping(keep);
    batch.batch_size = std::max<std::int64_t>(batch.batch_size - static_cast<std::int64_t>(sums[0]), 1);
  }

  void log_step(double loss) {
    if (options_.run.logging_steps == 0 || run_.step() % options_.run.logging_steps != 0) return;
    const double mean = ddpkit::train::sum_over_ranks({loss}, group_).front();
    if (!run_.is_main()) return;
    if (options_.run.json)
      print_line(nlohmann::ordered_json{{"step", run_.step()}, {"loss", mean}}.dump());
    else
      print_line(fmt::format("step {}  loss {:.6f}", run_.step(), mean));
  }

  void report(ddpkit::train::Epoch& epoch, Measured& measured, double train_loss, double audio_seconds) {
    std::optional<EvaluationResult> dev;
    if (dev_ && (run_.epoch() % options_.evaluation.eval_every == 0 || run_.epoch() == options_.run.epochs))
      run_.retry([&] { dev = evaluate(*model_, *dev_, options_.evaluation, group_); });
    const double seconds = epoch.seconds(), step_seconds = measured.median_step_seconds();
    std::string line = fmt::format("Train Loss: {:.4f}", train_loss);
    nlohmann::ordered_json json = {{"train_loss", train_loss}};
    std::vector<std::pair<std::string, double>> scalars = {
        {"loss/train", train_loss}, {"training/audio_seconds_per_second", audio_seconds / seconds}};
    if (dev) {
      const double cer = dev->errors.cer(), wer = dev->errors.wer();
      line += fmt::format(" | Dev Loss: {:.4f}, CER: {:.2f}%, WER: {:.2f}%", dev->loss, 100 * cer, 100 * wer);
      json.update(
          {{"dev_loss", dev->loss}, {"dev_cer", cer}, {"dev_wer", wer}, {"dev_utterances", dev->errors.utterances}});
      scalars.insert(scalars.end(), {{"loss/dev", dev->loss}, {"error/dev_cer", cer}, {"error/dev_wer", wer}});
      samples_ = dev->samples;
    }
    json.update({{"audio_seconds", audio_seconds},
                 {"median_step_ms", 1e3 * step_seconds},
                 {"wait_seconds", measured.wait_seconds},
                 {"exchange_exposed_share", measured.exposed_us / 1e6 / seconds},
                 {"first_step_at", first_step_at_},
                 {"fullest_over_mean", measured.balance.fullest_over_mean},
                 {"padding", measured.balance.padding}});
    epoch.report(line + fmt::format(" | {:.1f} s, {:.3f} s/batch, {:.0f}x real time, waited {:.0f}%", seconds,
                                    step_seconds, audio_seconds / seconds, 100 * measured.wait_seconds / seconds),
                 json, scalars);
  }

  const Options& options_;
  ddpkit::ProcessGroup group_;
  ddpkit::train::Run& run_;
  std::shared_ptr<Recognizer> model_;
  Faults faults_;
  std::unique_ptr<Dataset> train_;
  std::unique_ptr<Dataset> dev_;  // Null if there is no dev set.
  ddpkit::LengthBucketedSampler sampler_;
  ddpkit::DistributedDataParallel<Recognizer> ddp_;
  ddpkit::optim::FusedAdamW optimizer_;
  ddpkit::train::MeanLoss loss_;                  // Of this epoch.
  FeatureSums features_{options_.features.mels};  // Of the first epoch.
  double first_step_at_ = 0;
  std::vector<Sample> samples_;
};

}  // namespace

void train(Options& options, const ddpkit::train::Options& declared, const ddpkit::ProcessGroup& group) {
  if (options.data.train.empty())
    throw UsageError(
        "data.train is not given (a manifest, or a folder in LibriSpeech's layout), and there is no data/speech; "
        "script/data speech fetches it");
  ddpkit::train::Run run(options.run, declared, group);
  run.print("Loading data...");
  Trainer(options, group, run).run();
}

}  // namespace asr
