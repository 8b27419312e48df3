#include "gpt/trainer.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/ddpkit.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/run.h>
#include <ddpkit/train/together.h>

#include "gpt/corpus.h"
#include "gpt/model.h"

namespace gpt {
namespace {

using ddpkit::optim::FusedAdamW;
using ddpkit::optim::ShardedOptimizer;

/// The model under --sharding, and its optimizer.
class Parallel {
 public:
  Parallel(const TrainOptions& options, const std::shared_ptr<Gpt>& model, const ddpkit::ProcessGroup& group) {
    const auto adamw = torch::optim::AdamWOptions(options.run.lr).weight_decay(options.run.weight_decay);
    if (options.sharding == Sharding::kFsdp) {
      fsdp_ = std::make_unique<ddpkit::FullyShardedDataParallel<Gpt>>(model, group);
      sharded_ = std::make_unique<ShardedOptimizer<FusedAdamW>>(*fsdp_, adamw);
      return;
    }
    ddp_ = std::make_unique<ddpkit::DistributedDataParallel<Gpt>>(model, group);
    if (options.sharding == Sharding::kZero2)
      sharded_ = std::make_unique<ShardedOptimizer<FusedAdamW>>(*ddp_, adamw);
    else
      whole_ = std::make_unique<FusedAdamW>(model->parameters(), adamw);
  }

  at::Tensor forward(const at::Tensor& ids) { return fsdp_ ? fsdp_->forward(ids) : ddp_->forward(ids); }
  torch::optim::Optimizer& optimizer() { return sharded_ ? static_cast<torch::optim::Optimizer&>(*sharded_) : *whole_; }
  ddpkit::DistributedDataParallelBase& wrapper() {
    return fsdp_ ? static_cast<ddpkit::DistributedDataParallelBase&>(*fsdp_) : *ddp_;
  }
  void zero_grad() { sharded_ ? sharded_->zero_grad() : whole_->zero_grad(); }
  void clip_grad_norm(double most) { (void)(sharded_ ? sharded_->clip_grad_norm(most) : whole_->clip_grad_norm(most)); }

 private:
  std::unique_ptr<ddpkit::DistributedDataParallel<Gpt>> ddp_;
  std::unique_ptr<ddpkit::FullyShardedDataParallel<Gpt>> fsdp_;
  std::unique_ptr<ShardedOptimizer<FusedAdamW>> sharded_;
  std::unique_ptr<FusedAdamW> whole_;
};

class Trainer {
 public:
  Trainer(const TrainOptions& options, const ddpkit::train::Options& declared, const Corpus& corpus,
          const ddpkit::ProcessGroup& group, ddpkit::train::Run& run)
      : options_(options),
        declared_(declared),
        corpus_(corpus),
        group_(group),
        run_(run),
        train_(samples_of(corpus.train)),
        validation_(samples_of(corpus.validation)),
        sampler_(static_cast<std::size_t>(train_.size(0)), group, {.seed = options.run.seed}),
        model_(make_model()),
        parallel_(options, model_, group) {}

  void run() {
    run_.start({.model = *model_,
                .optimizer = parallel_.optimizer(),
                .wrapper = &parallel_.wrapper(),
                .model_name = "gpt",
                .optimizer_name = "adamw",
                .sampler = &sampler_,
                .state = {ddpkit::train::checkpoint_part("loss", loss_, /*of_each_rank=*/true)}},
               {{"text", corpus_.name},
                {"tokens", corpus_.tokens()},
                {"train_characters", corpus_.train.numel()},
                {"validation_characters", corpus_.validation.numel()}});
    while (run_.has_epoch() && train_epoch()) run_.save();
    if (!run_.finish()) return;
    if (std::isnan(validated_)) run_.retry([&] { validated_ = validate(); });
    std::string text;
    run_.retry([&] { text = write(); });
    if (!text.empty()) run_.print(text);
    run_.print_summary(fmt::format("validation loss {:.4f}", validated_));
  }

 private:
  /// Cuts the text into inputs of `context` characters and the character that follows. [sample, context + 1]
  at::Tensor samples_of(const at::Tensor& text) const {
    return text.unfold(0, options_.context + 1, options_.context).to(group_.device());
  }

  std::int64_t validation_batches() const {  // The same number on all ranks: with fsdp, forward is collective.
    const std::int64_t each = (validation_.size(0) + group_.world_size() - 1) / group_.world_size();
    return run_.batches_of(static_cast<std::size_t>(each));
  }

  std::shared_ptr<Gpt> make_model() const {
    run_.print_batches(run_.batches_of(sampler_.num_samples()), validation_batches());
    return run_.make_model([&] {
      return std::make_shared<Gpt>(ModelOptions{.tokens = corpus_.tokens(),
                                                .layers = options_.layers,
                                                .width = options_.width,
                                                .heads = options_.heads,
                                                .context = options_.context,
                                                .dropout = options_.dropout,
                                                .activation_checkpointing = options_.activation_checkpointing});
    });
  }

  at::Tensor loss_of(const at::Tensor& samples) {
    const ddpkit::optim::Autocast autocast = run_.autocast(group_.device());
    const at::Tensor logits = parallel_.forward(samples.narrow(1, 0, options_.context));
    return torch::cross_entropy_loss(logits.flatten(0, 1), samples.narrow(1, 1, options_.context).flatten());
  }

  // Returns false if the epoch is not complete: see Epoch::next().
  bool train_epoch() {
    ddpkit::train::Epoch epoch(run_, "characters", options_.context);
    if (epoch.is_new()) loss_ = {};
    validated_ = NAN;
    double mean = 0;
    epoch.retry([&] {
      model_->train();
      for (std::int64_t i = 0; epoch.next(); ++i) {
        const at::Tensor rows = torch::tensor(epoch.batch(i)).to(group_.device());
        const double loss = train_step(train_.index_select(0, rows));
        loss_.add(loss, static_cast<double>(rows.numel()));
        epoch.advance([&] { return fmt::format("loss={:.4f}", loss); });
      }
      mean = loss_.reduce(group_);
    });
    if (!epoch.finish(mean)) return false;
    run_.retry([&] { validated_ = validate(); });
    report(epoch, mean);
    return true;
  }

  double train_step(const at::Tensor& samples) {
    parallel_.zero_grad();
    const at::Tensor loss = loss_of(samples);
    run_.scaler().scale(loss).backward();
    if (options_.run.max_grad_norm > 0) {
      run_.scaler().unscale_(parallel_.optimizer());
      parallel_.clip_grad_norm(options_.run.max_grad_norm);
    }
    run_.step_optimizer();
    return loss.item<double>();
  }

  /// Returns the mean loss over all samples. Each rank evaluates every N-th sample.
  double validate() {
    const ddpkit::train::EvaluationScope scope(*model_, group_);
    const std::int64_t batches = validation_batches(), size = options_.run.batch_size;
    ddpkit::train::MeanLoss sum;
    ddpkit::train::ProgressBar bar = run_.bar(run_.epoch(), "Validation", batches);
    for (std::int64_t batch = 0; batch < batches; ++batch) {
      const at::Tensor of_rank = (torch::arange(size) + batch * size) * group_.world_size() + group_.rank();
      const at::Tensor own = of_rank.masked_select(of_rank < validation_.size(0));
      // A rank without samples takes part in forward, but its loss does not count.
      const at::Tensor rows = own.numel() > 0 ? own : torch::zeros({1}, torch::kLong);
      const double loss = loss_of(validation_.index_select(0, rows.to(group_.device()))).item<double>();
      sum.add(loss, static_cast<double>(own.numel()));
      bar.advance();
    }
    return sum.reduce(group_);
  }

  /// Returns text that the model continues from --prompt. Collective: with fsdp, no rank has all weights.
  std::string write() {
    if (options_.characters == 0) return {};
    const ddpkit::train::EvaluationScope scope(*model_, group_);
    std::string text = options_.prompt;
    at::Tensor ids = corpus_.encode(text).to(group_.device()).unsqueeze(0);
    if (ids.numel() == 0) ids = torch::zeros({1, 1}, ids.options());
    torch::manual_seed(options_.run.seed);
    for (std::int64_t i = 0; i < options_.characters; ++i) {
      const std::int64_t begin = std::max<std::int64_t>(0, ids.size(1) - options_.context);
      const at::Tensor logits = parallel_.forward(ids.slice(1, begin)).select(1, -1).to(torch::kFloat);
      const at::Tensor next = options_.temperature == 0
                                  ? logits.argmax(-1, /*keepdim=*/true)
                                  : torch::multinomial(torch::softmax(logits / options_.temperature, -1), 1);
      group_.broadcast(next, 0);
      text += corpus_.decode(next.item<std::int64_t>());
      ids = torch::cat({ids, next}, 1);
    }
    return text;
  }

  void report(ddpkit::train::Epoch& epoch, double loss) {
    epoch.report(
        fmt::format("Train Loss: {:.4f} | Val Loss: {:.4f}, Perplexity: {:.2f} | {:.1f} s, {:.0f} characters/s", loss,
                    validated_, std::exp(validated_), epoch.seconds(), epoch.items_per_second()),
        {{"train_loss", loss},
         {"validation_loss", validated_},
         {"perplexity", std::exp(validated_)},
         {"sharding", declared_.text("sharding")}},
        {{"loss/train", loss},
         {"loss/validation", validated_},
         {"training/characters_per_second", epoch.items_per_second()}});
  }

  const TrainOptions& options_;
  const ddpkit::train::Options& declared_;
  const Corpus& corpus_;
  ddpkit::ProcessGroup group_;
  ddpkit::train::Run& run_;
  at::Tensor train_, validation_;
  ddpkit::DistributedSampler sampler_;
  std::shared_ptr<Gpt> model_;
  Parallel parallel_;
  ddpkit::train::MeanLoss loss_;  // Of the current epoch.
  double validated_ = NAN;        // Validation loss of the current weights; NaN: not known.
};

}  // namespace

void train(TrainOptions& options, const ddpkit::train::Options& declared, ddpkit::train::Program& program) {
  if (options.width % options.heads != 0)
    throw ddpkit::train::UsageError(
        fmt::format("--width {} is no multiple of --heads {}", options.width, options.heads));
  const ddpkit::ProcessGroup group = program.join(options.run);
  ddpkit::train::Run run(options.run, declared, group);
  run.print("Loading data...");
  Corpus corpus;
  ddpkit::train::run_together(group, [&] { corpus = read_corpus(options.data, options.context); });
  run.print(fmt::format("{}: {} training and {} validation characters, {} different ones", corpus.name,
                        corpus.train.numel(), corpus.validation.numel(), corpus.tokens()));
  Trainer(options, declared, corpus, group, run).run();
}

}  // namespace gpt
