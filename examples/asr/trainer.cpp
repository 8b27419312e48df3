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
#include <ddpkit/train/checkpoint.h>
#include <ddpkit/train/json_text.h>
#include <ddpkit/train/main.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/progress.h>
#include <ddpkit/train/run_folder.h>
#include <ddpkit/train/stop_signal.h>
#include <ddpkit/train/summary_writer.h>
#include <ddpkit/train/text.h>
#include <ddpkit/train/together.h>

#include "asr/evaluation.h"
#include "asr/report.h"
#include "asr/trained_model.h"

namespace asr {
namespace {

using ddpkit::train::print_line;

using Clock = std::chrono::steady_clock;
using ddpkit::train::UsageError;

double seconds_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

// Sums over an epoch on one rank.
struct Sums {
  explicit Sums(std::int64_t mels) : features(mels) {}

  double loss = 0, utterances = 0;
  FeatureSums features;  // Filled in the first epoch.

  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("loss", c10::IValue(loss));
    archive.write("utterances", c10::IValue(utterances));
    archive.write("moments", features.moments);
    archive.write("frames", c10::IValue(features.frames));
  }
  void load(torch::serialize::InputArchive& archive) {
    c10::IValue value;
    archive.read("loss", value);
    loss = value.toDouble();
    archive.read("utterances", value);
    utterances = value.toDouble();
    archive.read("moments", features.moments);
    archive.read("frames", value);
    features.frames = value.toInt();
  }
};

std::shared_ptr<Recognizer> seeded_model(const Options& options, c10::Device device) {
  torch::manual_seed(options.run.seed);
  auto model = std::make_shared<Recognizer>(model_options(options));
  model->to(device);
  return model;
}

class Trainer {
 public:
  Trainer(const Options& options, const ddpkit::train::Options& declared, const ddpkit::ProcessGroup& group)
      : options_(options),
        declared_(declared),
        group_(group),
        amp_(options.run.amp ? ddpkit::optim::fastest_type(group.device()) : at::kFloat),
        model_(seeded_model(options, group.device())),
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
                   torch::optim::AdamWOptions(options.run.lr).weight_decay(options.run.weight_decay)),
        scheduler_(optimizer_, schedule(), {.scaling = options.run.lr_scaling, .world_size = group.world_size()}),
        scaler_(group, {.enabled = amp_ == at::kHalf}) {
    if (!options.data.dev.empty()) dev_ = open_dataset(options.data.dev, options, *model_, faults_, group);
  }

  void run() {
    if (!options_.run.save_dir.empty()) open_folder();
    if (speaks() && !options_.run.json) print_header();
    while (info_.epoch < options_.run.epochs && !is_out_of_steps()) {
      const bool is_whole = train_epoch();
      if (checkpoint_ && (is_whole || is_stopped_ || options_.run.save_steps > 0)) save();
      if (!is_whole) break;
    }
    if (checkpoint_) checkpoint_->wait();
    if (is_stopped_) {
      if (speaks()) ddpkit::train::log_line("asr: " + stop_.describe(info_.step, checkpoint_.has_value()));
      return;
    }
    const auto faults = faults_.count(group_);
    if (!speaks()) return;
    if (!options_.run.json) {
      for (const Sample& sample : samples_)
        print_line(
            fmt::format("{}\n  reference:  {}\n  hypothesis: {}", sample.name, sample.reference, sample.hypothesis));
    }
    print_line(describe(faults));
  }

 private:
  bool speaks() const { return group_.rank() == 0; }
  bool is_out_of_steps() const { return options_.run.max_steps && info_.step >= *options_.run.max_steps; }

  const char* amp_name() const { return amp_ == at::kFloat ? "off" : amp_ == at::kHalf ? "float16" : "bfloat16"; }

  std::shared_ptr<Recognizer> converted() {
    if (options_.run.sync_batchnorm) ddpkit::convert_sync_batchnorm(model_, group_);
    return model_;
  }

  // Learning rate by update number. The warm-up begins at the rate for one rank (Goyal et al., arXiv 1706.02677).
  ddpkit::optim::Schedule schedule() const {
    const auto batches = static_cast<double>(sampler_.num_batches());
    ddpkit::optim::Schedule result;
    if (options_.run.lr_schedule == "cosine")
      result = ddpkit::optim::cosine_decay(static_cast<std::int64_t>(batches) * options_.run.epochs);
    const auto warmup = static_cast<std::int64_t>(batches * options_.run.warmup_epochs);
    if (warmup == 0) return result;
    const double scale = ddpkit::optim::learning_rate_scale(options_.run.lr_scaling, group_.world_size());
    return result * ddpkit::optim::warmup(warmup, std::min(1.0 / 3, 1 / scale));
  }

  std::string config() const {
    nlohmann::json config = nlohmann::json::parse(declared_.resolved());
    config.update({{"program", "asr"},
                   {"precision", amp_name()},
                   {"world_size", group_.world_size()},
                   {"train_utterances", train_->size()}});
    return ddpkit::train::json_text(config);
  }

  std::vector<ddpkit::train::CheckpointPart> parts() {
    return {ddpkit::train::checkpoint_part("scheduler", scheduler_), ddpkit::train::checkpoint_part("scaler", scaler_),
            ddpkit::train::checkpoint_part("sampler", sampler_),
            ddpkit::train::checkpoint_part("sums", sums_, /*of_each_rank=*/true)};
  }

  void open_folder() {
    folder_ = ddpkit::train::open_run_folder(options_.run, declared_, config(), {"world_size"}, group_);
    checkpoint_.emplace(folder_.checkpoint, group_,
                        ddpkit::train::CheckpointOptions{.keep = options_.run.save_total_limit});
    if (folder_.to_resume) info_ = checkpoint_->load(*model_, optimizer_, parts());
    ddpkit::train::open_summary(summary_, options_.run, folder_, config(), info_.step, group_);
  }

  void save() {
    info_.config = config();
    checkpoint_->save(*model_, optimizer_, info_, parts());
  }

  void print_header() const {
    print_line(fmt::format("{}: {} utterances, {:.1f} minutes; dev: {}", options_.data.train, train_->size(),
                           train_->seconds() / 60, dev_ ? fmt::format("{} utterances", dev_->size()) : "none"));
    print_line(fmt::format(
        "model with {} parameters ({:.2f} M), {} utterances a step on {} rank{} ({}, {}), mixed precision {}",
        parameter_count(*model_), static_cast<double>(parameter_count(*model_)) / 1e6, options_.run.batch_size,
        group_.world_size(), group_.world_size() == 1 ? "" : "s", group_.backend_name(), group_.device().str(),
        amp_name()));
    if (folder_.to_resume) print_line(fmt::format("resumed from {}, step {}", folder_.checkpoint.string(), info_.step));
  }

  Augmentation augmentation() const {
    return {.spec_augment = options_.spec_augment ? std::optional(options_.spec) : std::nullopt,
            .noise_layers = options_.model.dropout > 0 ? options_.model.layers : 0,
            .noise_width = options_.model.width,
            .seed = options_.run.seed,
            .epoch = info_.epoch};
  }

  // Returns false if the run reached its last step before the end of the epoch.
  bool train_epoch() {
    sampler_.set_epoch(static_cast<std::uint64_t>(info_.epoch));
    const auto begin = static_cast<std::int64_t>(sampler_.position());
    const auto total = static_cast<std::int64_t>(sampler_.num_batches());
    const auto& batches = sampler_.batches();
    sampler_.set_position(sampler_.position());
    const Augmentation augmentation = this->augmentation();
    model_->train();
    ddpkit::Prefetcher<Batch> loader(total - begin,
                                     [&](std::int64_t number) {
                                       const auto& batch = batches[static_cast<std::size_t>(begin + number)];
                                       return train_->batch(batch.indices, batch.repeated, batch.batch_size,
                                                            augmentation);
                                     },
                                     {.num_workers = options_.run.num_workers});
    ddpkit::train::ProgressBar bar(
        total - begin, ddpkit::train::progress_options(
                           options_.run, fmt::format("Epoch {}/{} Training", info_.epoch + 1, options_.run.epochs),
                           "utterances", options_.run.batch_size, group_));
    Epoch epoch{.epochs = options_.run.epochs,
                .world_size = group_.world_size(),
                .fullest_over_mean = sampler_.balance().fullest_over_mean,
                .padding = sampler_.balance().padding};
    if (begin == 0) sums_ = Sums(options_.features.mels);
    std::vector<double> step_seconds;
    double exposed_us = 0;
    const Clock::time_point start = Clock::now();
    Clock::time_point step_began = start;
    while (sampler_.position() < sampler_.num_batches() && !is_out_of_steps() && !(is_stopped_ = stop_.requested())) {
      ddpkit::set_step(info_.step);
      const std::optional<Batch> batch = loader.next();
      epoch.lr = scheduler_.learning_rates().front();
      const double loss = train_step(batch->to(group_.device()));
      if (info_.epoch == 0) sums_.features.add(batch->sums);
      for (const std::size_t index : batch->utterances)
        epoch.audio_seconds += static_cast<double>((*train_)[index].frames) * options_.features.hop_ms / 1000;
      sampler_.set_position(sampler_.position() + 1);
      ++info_.step;
      const auto& stats = ddp_.stats();
      exposed_us += stats.end_us - stats.last_gradient_us;
      const Clock::time_point now = Clock::now();
      step_seconds.push_back(seconds_between(step_began, now));
      step_began = now;
      if (first_step_at_ == 0)
        first_step_at_ = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
      bar.advance([&] { return fmt::format("loss={:.4f}", loss); });
      log_step(loss);
      if (options_.run.save_steps > 0 && info_.step % options_.run.save_steps == 0 &&
          sampler_.position() < sampler_.num_batches() && checkpoint_) {
        save();
        step_began = Clock::now();
      }
    }
    epoch.seconds = seconds_between(start, Clock::now());
    epoch.wait_seconds = loader.stats().wait_seconds;
    bar.clear();
    const std::vector<double> sums =
        ddpkit::train::sum_over_ranks({sums_.loss, sums_.utterances, epoch.audio_seconds}, group_);
    if (sampler_.position() < sampler_.num_batches()) return false;
    if (info_.epoch == 0) set_feature_statistics();
    ++info_.epoch;
    sampler_.set_epoch(static_cast<std::uint64_t>(info_.epoch));
    epoch.epoch = info_.epoch;
    epoch.step = info_.step;
    epoch.train_loss = sums[0] / sums[1];
    epoch.audio_seconds = sums[2];
    epoch.first_step_at = first_step_at_;
    if (!step_seconds.empty()) {
      std::nth_element(step_seconds.begin(),
                       step_seconds.begin() + static_cast<std::ptrdiff_t>(step_seconds.size() / 2), step_seconds.end());
      epoch.median_step_ms = 1e3 * step_seconds[step_seconds.size() / 2];
      epoch.exchange_exposed_share = exposed_us / 1e6 / epoch.seconds;
    }
    report(epoch);
    return true;
  }

  void set_feature_statistics() {
    const auto [mean, deviation] = sums_.features.statistics(group_);
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
        const ddpkit::optim::Autocast autocast(group_.device(), amp_ == at::kFloat ? at::kBFloat16 : amp_,
                                               {.enabled = amp_ != at::kFloat});
        losses = ctc_losses(ddp_(batch.features, batch.noise), steps_of(*model_, batch), batch);
      }
      const at::Tensor sum = torch::dot(losses, batch.weights);
      // DistributedDataParallel computes the mean over ranks, but their shares may differ in size.
      scaler_.scale(sum * (static_cast<double>(group_.world_size()) / static_cast<double>(batch.batch_size)))
          .backward();
      scaler_.unscale_(optimizer_);
      const double most = options_.run.max_grad_norm > 0 ? options_.run.max_grad_norm : HUGE_VAL;
      const double norm = ddpkit::optim::clip_grad_norm_(model_->parameters(), most);
      // The gradients and their norm are equal on all ranks, so all ranks take the same branch.
      if (std::isfinite(norm) || scaler_.is_enabled()) {
        scaler_.step(optimizer_);
        scaler_.update();
        scheduler_.step();
        const double loss = sum.item<double>();
        if (std::isfinite(loss)) {
          sums_.loss += loss;
          sums_.utterances += batch.weights.sum().item<double>();
        }
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
                      info_.step + 1, advice),
          {.rank = 0});
    ddpkit::train::run_together(group_, [&] {
      for (std::int64_t row = 0; row < batch.size(); ++row) {
        if (keep[static_cast<std::size_t>(row)]) continue;
        const std::string file = (*train_)[batch.utterances[static_cast<std::size_t>(row)]].where();
        faults_.add(Fault::kNanLoss, file,
                    fmt::format("{}: its loss became {} in step {}", file, losses[row].item<double>(), info_.step + 1));
      }
    });
    batch = batch.keeping(keep);
    batch.batch_size = std::max<std::int64_t>(batch.batch_size - static_cast<std::int64_t>(sums[0]), 1);
  }

  void log_step(double loss) {
    if (options_.run.logging_steps == 0 || info_.step % options_.run.logging_steps != 0) return;
    const double mean = ddpkit::train::sum_over_ranks({loss}, group_).front();
    if (!speaks()) return;
    if (options_.run.json)
      print_line(nlohmann::ordered_json{{"step", info_.step}, {"loss", mean}}.dump());
    else
      print_line(fmt::format("step {}  loss {:.6f}", info_.step, mean));
  }

  void report(Epoch& epoch) {
    if (dev_ && (info_.epoch % options_.evaluation.eval_every == 0 || info_.epoch == options_.run.epochs)) {
      const EvaluationResult result = evaluate(*model_, *dev_, options_.evaluation, group_);
      epoch.dev_loss = result.loss;
      epoch.dev = result.errors;
      samples_ = result.samples;
    }
    epoch.peak_memory_bytes = ddpkit::train::peak_memory_of_ranks(group_);
    if (!speaks()) return;
    print_line(options_.run.json ? as_json(epoch) : as_line(epoch));
    if (summary_) write_to(*summary_, epoch);
  }

  const Options& options_;
  const ddpkit::train::Options& declared_;
  ddpkit::ProcessGroup group_;
  at::ScalarType amp_;
  std::shared_ptr<Recognizer> model_;
  Faults faults_;
  std::unique_ptr<Dataset> train_;
  std::unique_ptr<Dataset> dev_;  // Null if there is no dev set.
  ddpkit::LengthBucketedSampler sampler_;
  ddpkit::DistributedDataParallel<Recognizer> ddp_;
  ddpkit::optim::FusedAdamW optimizer_;
  ddpkit::optim::LearningRateScheduler scheduler_;
  ddpkit::optim::GradScaler scaler_;
  ddpkit::train::RunFolder folder_;
  std::optional<ddpkit::train::Checkpoint> checkpoint_;
  ddpkit::train::CheckpointInfo info_;  // The progress of the run.
  Sums sums_{options_.features.mels};   // Of this epoch on this rank.
  double first_step_at_ = 0;
  std::vector<Sample> samples_;
  std::optional<ddpkit::train::SummaryWriter> summary_;
  ddpkit::train::StopSignal stop_{group_};
  bool is_stopped_ = false;
};

}  // namespace

void train(const Options& options, const ddpkit::train::Options& declared, const ddpkit::ProcessGroup& group) {
  if (options.data.train.empty())
    throw UsageError(
        "data.train is not given (a manifest, or a folder in LibriSpeech's layout), and there is no data/speech; "
        "script/data speech fetches it");
  Trainer(options, declared, group).run();
}

}  // namespace asr
