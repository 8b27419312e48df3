#include "har/trainer.h"

#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>

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

#include "har/dataset.h"
#include "har/devices.h"
#include "har/generate.h"
#include "har/report.h"

namespace har {
namespace {

using ddpkit::train::print_line;

using ddpkit::train::ClassificationMetrics;
using ddpkit::train::ClassificationResult;
using ddpkit::train::UsageError;

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const TrainOptions& options,
                                                        const std::vector<at::Tensor>& parameters) {
  const double lr = options.run.lr, weight_decay = options.run.weight_decay;
  if (options.optimizer == "sgd")
    return std::make_unique<ddpkit::optim::FusedSGD>(
        parameters, torch::optim::SGDOptions(lr).momentum(options.momentum).weight_decay(weight_decay));
  if (options.optimizer == "adam")
    return std::make_unique<ddpkit::optim::FusedAdam>(parameters,
                                                      torch::optim::AdamOptions(lr).weight_decay(weight_decay));
  return std::make_unique<ddpkit::optim::FusedAdamW>(parameters,
                                                     torch::optim::AdamWOptions(lr).weight_decay(weight_decay));
}

class Trainer {
 public:
  Trainer(const TrainOptions& options, const ddpkit::train::Options& declared, const Dataset& dataset,
          const std::vector<c10::Device>& places, const ddpkit::ProcessGroup& group)
      : options_(options),
        declared_(declared),
        dataset_(dataset),
        group_(group),
        places_(places),
        amp_(options.run.amp ? ddpkit::optim::fastest_type(group.device()) : at::kFloat),
        train_(dataset.train.to(group.device())),
        test_(dataset.test.to(group.device())),
        model_(seeded_model()),
        devices_(make_devices(options, places, model_, group)),
        optimizer_(make_optimizer(options, model_->parameters())),
        sampler_(static_cast<std::size_t>(dataset.train.size()), group, {.seed = options.run.seed}),
        batch_size_(std::int64_t{options.run.batch_size} * devices_->count()),
        updates_(updates_of(sampler_.num_samples())),
        scheduler_(*optimizer_, schedule(), {.scaling = options.run.lr_scaling, .world_size = all_devices()}),
        scaler_(group, {.enabled = amp_ == at::kHalf}),
        metrics_(dataset.classes()) {}

  void run() {
    if (!options_.run.save_dir.empty()) open_folder();
    if (speaks() && !options_.run.json) print_header();
    while (info_.epoch < options_.run.epochs && !is_out_of_steps()) {
      if (!train_epoch()) break;
      if (checkpoint_) save();
    }
    if (checkpoint_) checkpoint_->wait();
    if (timeline_) timeline_->write();
    if (is_stopped_) {
      if (speaks()) ddpkit::train::log_line("har: " + stop_.describe(info_.step, checkpoint_.has_value()));
      return;
    }
    const ClassificationResult test = evaluated_ ? *evaluated_ : evaluate();
    if (!speaks()) return;
    if (!options_.run.json) print_line(ddpkit::train::confusion_table(test, dataset_.class_names));
    print_line(fmt::format("test accuracy {:.1f} %", 100 * test.accuracy));
  }

 private:
  int all_devices() const { return devices_->count() * group_.world_size(); }  // Over all ranks.
  bool speaks() const { return group_.rank() == 0; }
  bool is_out_of_steps() const { return options_.run.max_steps && info_.step >= *options_.run.max_steps; }

  // Returns the updates that `samples` of this rank make.
  std::int64_t updates_of(std::size_t samples) const {
    const std::int64_t batches = (static_cast<std::int64_t>(samples) + batch_size_ - 1) / batch_size_;
    return (batches + options_.run.grad_accum_steps - 1) / options_.run.grad_accum_steps;
  }

  std::shared_ptr<Classifier> seeded_model() const {
    torch::manual_seed(options_.run.seed);
    auto model = make_model({.mode = options_.mode,
                             .channels = dataset_.channels(),
                             .steps = dataset_.steps(),
                             .classes = dataset_.classes(),
                             .dropout = options_.dropout});
    model->to(group_.device());
    return model;
  }

  // Learning rate by update number. The warm-up begins at the rate for one device (Goyal et al., arXiv 1706.02677).
  ddpkit::optim::Schedule schedule() const {
    const std::int64_t total = updates_ * options_.run.epochs;
    ddpkit::optim::Schedule result;
    if (options_.run.lr_schedule == "cosine") result = ddpkit::optim::cosine_decay(total);
    if (options_.run.warmup_epochs == 0) return result;
    const double scale = ddpkit::optim::learning_rate_scale(options_.run.lr_scaling, all_devices());
    const auto updates = static_cast<std::int64_t>(static_cast<double>(updates_) * options_.run.warmup_epochs);
    return result * ddpkit::optim::warmup(updates, scale > 1 ? 1 / scale : 1.0 / 3);
  }

  const char* amp_name() const { return amp_ == at::kFloat ? "off" : amp_ == at::kHalf ? "float16" : "bfloat16"; }

  // The description of the run. open_folder() names the values that may differ when the run resumes.
  std::string config() const {
    nlohmann::json config = nlohmann::json::parse(declared_.resolved());
    config.update({{"program", "har"},
                   {"data_set", dataset_.name},
                   {"train_windows", dataset_.train.size()},
                   {"channels", dataset_.channels()},
                   {"steps", dataset_.steps()},
                   {"classes", dataset_.classes()},
                   {"precision", amp_name()},
                   {"world_size", group_.world_size()},
                   {"devices", all_devices()}});
    return ddpkit::train::json_text(config);
  }

  std::vector<ddpkit::train::CheckpointPart> parts() {
    return {ddpkit::train::checkpoint_part("scheduler", scheduler_), ddpkit::train::checkpoint_part("scaler", scaler_),
            ddpkit::train::checkpoint_part("sampler", sampler_),
            ddpkit::train::checkpoint_part("metrics", metrics_, /*of_each_rank=*/true)};
  }

  void open_folder() {
    folder_ = ddpkit::train::open_run_folder(options_.run, declared_, config(), {"world_size", "devices"}, group_);
    checkpoint_.emplace(folder_.checkpoint, group_,
                        ddpkit::train::CheckpointOptions{.keep = options_.run.save_total_limit});
    if (folder_.to_resume) {
      info_ = checkpoint_->load(*model_, *optimizer_, parts());
      // On another number of devices an epoch has another number of updates. The schedule continues from the same
      // fraction of the run.
      sampler_.set_epoch(static_cast<std::uint64_t>(info_.epoch));
      scheduler_.set_step((info_.epoch + 1) * updates_ - updates_of(sampler_.indices().size()));
    }
    if (options_.profile) {
      timeline_.emplace(group_, std::filesystem::path(options_.run.save_dir) / "trace.json");
      devices_->set_timeline(*timeline_);
    }
    ddpkit::train::open_summary(summary_, options_.run, folder_, config(), info_.step, group_);
  }

  void save() {
    info_.config = config();
    checkpoint_->save(*model_, *optimizer_, info_, parts());
  }

  void print_header() const {
    std::int64_t parameters = 0;
    for (const at::Tensor& parameter : model_->parameters()) parameters += parameter.numel();
    print_line(fmt::format("{}: {} training and {} test windows of {} channels x {} steps, {} classes", dataset_.name,
                           dataset_.train.size(), dataset_.test.size(), dataset_.channels(), dataset_.steps(),
                           dataset_.classes()));
    const std::string where =
        options_.multi_gpu == MultiGpu::kDp || options_.multi_gpu == MultiGpu::kLibTorchDp
            ? fmt::format("{} replica{} ({}, {})", devices_->count(), devices_->count() == 1 ? "" : "s",
                          declared_.text("multi_gpu"), group_.device().str())
            : fmt::format("{} rank{} ({}, {}, {})", group_.world_size(), group_.world_size() == 1 ? "" : "s",
                          declared_.text("multi_gpu"), group_.backend_name(), group_.device().str());
    print_line(
        fmt::format("{} with {} parameters, {}, batch {}{} on each of {}, mixed precision {}", declared_.text("mode"),
                    parameters, options_.optimizer, options_.run.batch_size,
                    options_.run.grad_accum_steps == 1 ? "" : fmt::format(" x {} steps", options_.run.grad_accum_steps),
                    where, amp_name()));
    if (folder_.to_resume)
      print_line(
          fmt::format("resumed from {}, epoch {}, step {}", folder_.checkpoint.string(), info_.epoch, info_.step));
  }

  // `number`: index of the batch in the epoch, in this process.
  Batch make_batch(const at::Tensor& indices, std::int64_t number) const {
    const std::int64_t begin = number * batch_size_;
    const at::Tensor rows = indices.slice(0, begin, begin + batch_size_).to(group_.device());
    return {.windows = train_.windows.index_select(0, rows), .labels = train_.labels.index_select(0, rows)};
  }

  // Returns false if the run reached its last step before the end of the epoch.
  bool train_epoch() {
    sampler_.set_epoch(static_cast<std::uint64_t>(info_.epoch));
    const std::vector<std::size_t> order = sampler_.indices();
    // A run that resumes within an epoch also restores its sums, if the number of ranks is the same.
    if (ddpkit::train::seed_epoch(options_.run.seed, info_.epoch, group_.rank()))
      metrics_ = ClassificationMetrics(dataset_.classes());
    const at::Tensor indices = torch::tensor(std::vector<std::int64_t>(order.begin(), order.end()));
    model_->train();
    evaluated_.reset();
    const auto samples = static_cast<std::int64_t>(order.size());
    const std::int64_t batches = (samples + batch_size_ - 1) / batch_size_;
    const std::int64_t updates = updates_of(order.size());
    ddpkit::Prefetcher<Batch> loader(batches, [&](std::int64_t number) { return make_batch(indices, number); },
                                     {.num_workers = options_.run.num_workers});
    ddpkit::train::ProgressBar bar(
        updates, ddpkit::train::progress_options(
                     options_.run, fmt::format("Epoch {}/{} Training", info_.epoch + 1, options_.run.epochs), "samples",
                     static_cast<double>(samples) / static_cast<double>(updates) * group_.world_size(), group_));
    double lr = 0;
    const auto start = std::chrono::steady_clock::now();
    std::int64_t update = 0;
    const auto save_within_epoch = [&](std::int64_t updates_done) {
      const std::int64_t taken = updates_done * options_.run.grad_accum_steps * batch_size_;
      sampler_.set_position(static_cast<std::size_t>(std::min(taken, samples)));
      save();
    };
    for (; update < updates && !is_out_of_steps() && !(is_stopped_ = stop_.requested()); ++update) {
      ddpkit::set_step(info_.step);
      std::vector<Batch> parts;
      for (int i = 0; i < options_.run.grad_accum_steps; ++i) {
        if (auto batch = loader.next()) parts.push_back(std::move(*batch));
      }
      lr = scheduler_.learning_rates().front();
      const at::Tensor loss = train_step(parts);
      ++info_.step;
      bar.advance([&] { return fmt::format("loss={:.4f}", loss.item<double>()); });
      if (update + 1 < updates && checkpoint_ && options_.run.save_steps > 0 &&
          info_.step % options_.run.save_steps == 0)
        save_within_epoch(update + 1);
    }
    // Without a new update, the last checkpoint is already current.
    if (is_stopped_ && update > 0 && checkpoint_) save_within_epoch(update);
    const ClassificationResult train = metrics_.reduce(group_);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    bar.clear();
    if (is_stopped_) return false;
    if (!std::isfinite(train.loss)) {
      throw ddpkit::Error(
          fmt::format("the loss became {} in epoch {}: lower --lr ({})", train.loss, info_.epoch + 1, options_.run.lr),
          {.rank = 0});
    }
    if (update < updates) return false;
    ++info_.epoch;
    sampler_.set_epoch(static_cast<std::uint64_t>(info_.epoch));
    evaluated_ = evaluate();
    const std::vector<std::int64_t> memory = ddpkit::train::peak_memory_of_ranks(group_);
    const std::vector<std::int64_t> on_devices = ddpkit::train::peak_memory_of_devices(places_, group_);
    if (speaks()) report(train, lr, samples * group_.world_size(), elapsed.count(), memory, on_devices);
    return true;
  }

  // Makes one update with the mean loss over the samples of all `batches`, on all devices of all ranks.
  at::Tensor train_step(const std::vector<Batch>& batches) {
    const auto samples = std::accumulate(batches.begin(), batches.end(), std::int64_t{0},
                                         [](std::int64_t sum, const Batch& batch) { return sum + batch.size(); });
    optimizer_->zero_grad();
    at::Tensor mean;
    for (const Batch& batch : batches) {
      // Each sample has the same weight, also in the last batch of an epoch, which may be smaller.
      const double share = static_cast<double>(batch.size()) / static_cast<double>(samples);
      const Devices::Loss loss = [&](const Devices::Forward& forward, const Batch& part) {
        const ddpkit::optim::Autocast autocast(part.windows.device(), amp_ == at::kFloat ? at::kBFloat16 : amp_,
                                               {.enabled = amp_ != at::kFloat});
        const at::Tensor logits = forward(part.windows);
        metrics_.add_predictions(logits, part.labels);
        return scaler_.scale(torch::cross_entropy_loss(logits, part.labels) * share);
      };
      const at::Tensor part = devices_->backward(batch, loss, &batch == &batches.back()) / scaler_.get_scale();
      mean = mean.defined() ? mean + part : part;
    }
    metrics_.add_loss(mean, samples);
    scaler_.step(*optimizer_);
    scaler_.update();
    scheduler_.step();
    return mean;
  }

  // Evaluates each test window once, each on one rank.
  ClassificationResult evaluate() {
    const torch::NoGradGuard no_grad;
    // The statistics of batch normalisation differ between ranks. All ranks evaluate with those of rank 0, which the
    // checkpoint holds.
    for (const at::Tensor& buffer : model_->buffers()) group_.broadcast(buffer);
    model_->eval();
    ClassificationMetrics metrics(dataset_.classes());
    const auto share = ddpkit::train::evaluation_share(test_.size(), group_.rank(), group_.world_size());
    constexpr std::int64_t kBatch = 256;
    for (std::int64_t begin = share.begin; begin < share.end; begin += kBatch) {
      const std::int64_t end = std::min(begin + kBatch, share.end);
      const at::Tensor targets = test_.labels.slice(0, begin, end);
      const at::Tensor logits = model_->forward(test_.windows.slice(0, begin, end));
      metrics.add(logits, targets, torch::cross_entropy_loss(logits, targets));
    }
    return metrics.reduce(group_);
  }

  void report(const ClassificationResult& train, double lr, std::int64_t samples, double seconds,
              const std::vector<std::int64_t>& memory, const std::vector<std::int64_t>& on_devices) {
    const Epoch epoch{.epoch = info_.epoch,
                      .epochs = options_.run.epochs,
                      .step = info_.step,
                      .devices = all_devices(),
                      .world_size = group_.world_size(),
                      .lr = lr,
                      .samples = samples,
                      .seconds = seconds,
                      .peak_memory_bytes = memory,
                      .peak_device_bytes = on_devices,
                      .train = train,
                      .test = *evaluated_};
    print_line(options_.run.json ? as_json(epoch) : as_line(epoch));
    if (summary_) write_to(*summary_, epoch);
  }

  const TrainOptions& options_;
  const ddpkit::train::Options& declared_;
  const Dataset& dataset_;
  ddpkit::ProcessGroup group_;
  std::vector<c10::Device> places_;
  at::ScalarType amp_;
  Split train_;
  Split test_;
  std::shared_ptr<Classifier> model_;
  std::unique_ptr<Devices> devices_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  ddpkit::DistributedSampler sampler_;
  std::int64_t batch_size_;  // Of this process, over all its devices.
  std::int64_t updates_;     // Per epoch.
  ddpkit::optim::LearningRateScheduler scheduler_;
  ddpkit::optim::GradScaler scaler_;
  ClassificationMetrics metrics_;  // Of the current epoch.
  ddpkit::train::RunFolder folder_;
  std::optional<ddpkit::train::Checkpoint> checkpoint_;
  ddpkit::train::CheckpointInfo info_;             // The progress of the run.
  std::optional<ClassificationResult> evaluated_;  // Of the current weights.
  std::optional<ddpkit::Timeline> timeline_;
  std::optional<ddpkit::train::SummaryWriter> summary_;
  ddpkit::train::StopSignal stop_{group_};
  bool is_stopped_ = false;
};

}  // namespace

void train(const TrainOptions& options, const ddpkit::train::Options& declared, ddpkit::train::Program& program) {
  const ddpkit::LaunchEnvironment environment = ddpkit::read_launch_environment();
  if (environment.world_size > 1 && options.multi_gpu != MultiGpu::kDdp)
    throw UsageError(
        fmt::format("--multi-gpu {} is one process, but the launcher started {}: start har without a launcher, or "
                    "use --multi-gpu ddp",
                    declared.text("multi_gpu"), environment.world_size));
  const std::vector<c10::Device> places = choose_devices(options, environment.local_rank, environment.local_world_size);
  const ddpkit::ProcessGroup group =
      program.init_process_group({.backend = options.run.backend, .device = places.front()});
  const std::string folder = ddpkit::train::data_folder(
      options.data, "data/har", [](const std::string& path) { generate_ucihar(path, {}); }, group);
  Dataset dataset;
  ddpkit::train::run_together(group, [&] { dataset = normalised(read_recordings(folder)); });
  Trainer(options, declared, dataset, places, group).run();
}

}  // namespace har
