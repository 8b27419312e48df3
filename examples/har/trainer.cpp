#include "har/trainer.h"

#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>

#include <fmt/format.h>

#include <ddpkit/ddpkit.h>
#include <ddpkit/train/checkpoint.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/progress.h>
#include <ddpkit/train/run_folder.h>
#include <ddpkit/train/together.h>

#include "har/dataset.h"

namespace har {
namespace {

using ddpkit::train::ClassificationMetrics;
using ddpkit::train::ClassificationResult;
using nlohmann::ordered_json;

const char* name_of(Mode mode) { return mode == Mode::kCnn ? "cnn" : mode == Mode::kLstm ? "lstm" : "flatten"; }

const char* name_of(OptimizerKind kind) {
  return kind == OptimizerKind::kAdamW ? "adamw" : kind == OptimizerKind::kAdam ? "adam" : "sgd";
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const TrainOptions& options,
                                                        const std::vector<at::Tensor>& parameters) {
  const double lr = options.trainer.lr;
  switch (options.optimizer) {
    case OptimizerKind::kSgd:
      return std::make_unique<torch::optim::SGD>(
          parameters, torch::optim::SGDOptions(lr).momentum(options.momentum).weight_decay(options.weight_decay));
    case OptimizerKind::kAdam:
      return std::make_unique<torch::optim::Adam>(parameters,
                                                  torch::optim::AdamOptions(lr).weight_decay(options.weight_decay));
    case OptimizerKind::kAdamW:
      break;
  }
  return std::make_unique<torch::optim::AdamW>(parameters,
                                               torch::optim::AdamWOptions(lr).weight_decay(options.weight_decay));
}

// A run's seed, made different for each epoch and rank; so dropout draws differently on each rank, and a resumed run
// draws what the run would have drawn had it never stopped.
std::uint64_t epoch_seed(std::uint64_t seed, std::int64_t epoch, int rank) {
  std::uint64_t mixed = seed;
  for (const std::uint64_t part : {static_cast<std::uint64_t>(epoch), static_cast<std::uint64_t>(rank)}) {
    // splitmix64, Steele et al. 2014.
    mixed += part + 0x9e3779b97f4a7c15;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    mixed ^= mixed >> 31;
  }
  return mixed;
}

class Trainer {
 public:
  Trainer(const TrainOptions& options, const Dataset& dataset, const ddpkit::ProcessGroup& group)
      : options_(options),
        dataset_(dataset),
        group_(group),
        train_(dataset.train.to(group.device())),
        test_(dataset.test.to(group.device())),
        model_(seeded_model()),
        ddp_(model_, group),
        optimizer_(make_optimizer(options, model_->parameters())),
        sampler_(static_cast<std::size_t>(dataset.train.size()), group, {.seed = options.trainer.seed}) {}

  void run() {
    if (!options_.trainer.save_dir.empty()) open_folder();
    if (speaks() && !options_.trainer.json) print_header();
    while (info_.epoch < options_.trainer.epochs && !is_out_of_steps()) {
      if (!train_epoch()) break;
      if (!folder_.checkpoint.empty()) save();
    }
    const ClassificationResult test = evaluated_ ? *evaluated_ : evaluate();
    if (speaks()) print(fmt::format("test accuracy {:.1f} %", 100 * test.accuracy));
  }

 private:
  bool speaks() const { return group_.rank() == 0; }
  bool is_out_of_steps() const { return options_.trainer.max_steps && info_.step >= *options_.trainer.max_steps; }

  static void print(const std::string& line) {
    fmt::print("{}\n", line);
    std::fflush(stdout);
  }

  std::shared_ptr<Classifier> seeded_model() const {
    torch::manual_seed(options_.trainer.seed);
    auto model = make_model({.mode = options_.mode,
                             .channels = dataset_.channels(),
                             .steps = dataset_.steps(),
                             .classes = dataset_.classes(),
                             .dropout = options_.dropout});
    model->to(group_.device());
    return model;
  }

  // What another run in the same folder would have to share to be the same run.
  std::string config() const {
    return nlohmann::json{
        {"program", "har"},
        {"data", dataset_.name},
        {"train_windows", dataset_.train.size()},
        {"channels", dataset_.channels()},
        {"steps", dataset_.steps()},
        {"classes", dataset_.classes()},
        {"mode", name_of(options_.mode)},
        {"optimizer", name_of(options_.optimizer)},
        {"lr", options_.trainer.lr},
        {"lr_schedule", options_.schedule == Schedule::kCosine ? "cosine" : "constant"},
        {"weight_decay", options_.weight_decay},
        {"momentum", options_.momentum},
        {"dropout", options_.dropout},
        {"batch_size", options_.trainer.batch_size},
        {"epochs", options_.trainer.epochs},
        {"seed", options_.trainer.seed},
        {"world_size", group_.world_size()},
    }
        .dump();
  }

  void open_folder() {
    folder_ = ddpkit::train::open_run_folder(
        options_.trainer.save_dir, config(),
        {.resume = options_.trainer.resume, .overwrite = options_.trainer.overwrite}, group_);
    if (!folder_.to_resume) return;
    info_ = ddpkit::train::load_checkpoint(folder_.checkpoint, *model_, *optimizer_, group_);
  }

  void save() {
    info_.config = config();
    ddpkit::train::save_checkpoint(folder_.checkpoint, *model_, *optimizer_, info_, group_);
  }

  void print_header() const {
    std::int64_t parameters = 0;
    for (const at::Tensor& parameter : model_->parameters()) parameters += parameter.numel();
    print(fmt::format("{}: {} training and {} test windows of {} channels x {} steps, {} classes", dataset_.name,
                      dataset_.train.size(), dataset_.test.size(), dataset_.channels(), dataset_.steps(),
                      dataset_.classes()));
    print(fmt::format("{} with {} parameters, {}, batch {} on each of {} rank{} ({}, {})", name_of(options_.mode),
                      parameters, name_of(options_.optimizer), options_.trainer.batch_size, group_.world_size(),
                      group_.world_size() == 1 ? "" : "s", group_.backend_name(), group_.device().str()));
    if (folder_.to_resume) print(fmt::format("resumed from {}, epoch {}", folder_.checkpoint.string(), info_.epoch));
  }

  // False when the run was out of steps before the epoch's end.
  bool train_epoch() {
    const int epochs = options_.trainer.epochs;
    const auto batch_size = static_cast<std::size_t>(options_.trainer.batch_size);
    torch::manual_seed(epoch_seed(options_.trainer.seed, info_.epoch, group_.rank()));
    sampler_.set_epoch(static_cast<std::uint64_t>(info_.epoch));
    sampler_.reset();
    model_->train();
    evaluated_.reset();
    ClassificationMetrics metrics(group_.device());
    const auto batches = static_cast<std::int64_t>((sampler_.num_samples() + batch_size - 1) / batch_size);
    ddpkit::train::ProgressBar bar(
        batches, {.label = fmt::format("epoch {:>3}/{}", info_.epoch + 1, epochs), .enabled = speaks()});
    const auto start = std::chrono::steady_clock::now();
    std::int64_t batch = 0;
    for (; batch < batches && !is_out_of_steps(); ++batch) {
      set_lr((static_cast<double>(info_.epoch) + static_cast<double>(batch) / static_cast<double>(batches)) / epochs);
      const at::Tensor loss = train_step(*sampler_.next(batch_size), metrics);
      ++info_.step;
      bar.advance([&] { return fmt::format("loss {:.4f}", loss.item<double>()); });
    }
    const ClassificationResult train = metrics.reduce(group_);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    bar.clear();
    if (!std::isfinite(train.loss)) {
      throw ddpkit::Error(fmt::format("the loss became {} in epoch {}: lower --lr ({})", train.loss, info_.epoch + 1,
                                      options_.trainer.lr),
                          {.rank = 0});
    }
    if (batch < batches) return false;
    ++info_.epoch;
    evaluated_ = evaluate();
    if (speaks()) print_epoch(train, *evaluated_, elapsed.count());
    return true;
  }

  // `progress` of the whole run: 0 .. 1. A function of it alone, so that a resumed run needs to remember nothing.
  void set_lr(double progress) {
    double lr = options_.trainer.lr;
    if (options_.schedule == Schedule::kCosine) lr *= 0.5 * (1 + std::cos(std::numbers::pi * progress));
    for (auto& group : optimizer_->param_groups()) group.options().set_lr(lr);
  }

  at::Tensor train_step(const std::vector<std::size_t>& indices, ClassificationMetrics& metrics) {
    const at::Tensor rows =
        torch::tensor(std::vector<std::int64_t>(indices.begin(), indices.end())).to(group_.device());
    const at::Tensor targets = train_.labels.index_select(0, rows);
    optimizer_->zero_grad();
    const at::Tensor logits = ddp_(train_.windows.index_select(0, rows));
    const at::Tensor loss = torch::cross_entropy_loss(logits, targets);
    loss.backward();
    optimizer_->step();
    metrics.add(logits, targets, loss);
    return loss;
  }

  // Every test window once, each on one rank.
  ClassificationResult evaluate() {
    const torch::NoGradGuard no_grad;
    // Batch normalisation has seen other batches on each rank: all evaluate with rank 0's statistics, which are those
    // that the checkpoint holds.
    for (const at::Tensor& buffer : model_->buffers()) group_.broadcast(buffer);
    model_->eval();
    ClassificationMetrics metrics(group_.device());
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

  void print_epoch(const ClassificationResult& train, const ClassificationResult& test, double seconds) const {
    const double samples_per_second = static_cast<double>(train.samples) / seconds;
    if (options_.trainer.json) {
      print(ordered_json{{"epoch", info_.epoch},
                         {"epochs", options_.trainer.epochs},
                         {"step", info_.step},
                         {"train_loss", train.loss},
                         {"train_accuracy", train.accuracy},
                         {"test_loss", test.loss},
                         {"test_accuracy", test.accuracy},
                         {"samples_per_second", samples_per_second},
                         {"seconds", seconds},
                         {"world_size", group_.world_size()}}
                .dump());
      return;
    }
    print(fmt::format("epoch {:>3}/{}  loss {:.4f}  accuracy {:5.1f} %  test {:5.1f} %  {:.0f} samples/s", info_.epoch,
                      options_.trainer.epochs, train.loss, 100 * train.accuracy, 100 * test.accuracy,
                      samples_per_second));
  }

  const TrainOptions& options_;
  const Dataset& dataset_;
  ddpkit::ProcessGroup group_;
  Split train_;
  Split test_;
  std::shared_ptr<Classifier> model_;
  ddpkit::DistributedDataParallel<Classifier> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  ddpkit::DistributedSampler sampler_;
  ddpkit::train::RunFolder folder_;
  ddpkit::train::CheckpointInfo info_;             // How far the run has come.
  std::optional<ClassificationResult> evaluated_;  // Of the weights as they are now.
};

}  // namespace

void train(const TrainOptions& options, ddpkit::train::Program& program) {
  const ddpkit::ProcessGroup group = program.init_process_group({.backend = options.trainer.backend});
  Dataset dataset;
  ddpkit::train::run_together(group, [&] { dataset = normalised(read_recordings(options.data)); });
  Trainer(options, dataset, group).run();
}

}  // namespace har
