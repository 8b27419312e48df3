#include "har/trainer.h"

#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/ddpkit.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/run.h>
#include <ddpkit/train/seed.h>
#include <ddpkit/train/together.h>

#include "har/dataset.h"
#include "har/devices.h"
#include "har/generate.h"

namespace har {
namespace {

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

constexpr std::int64_t kTestBatch = 256;

class Trainer {
 public:
  Trainer(const TrainOptions& options, const ddpkit::train::Options& declared, const Dataset& dataset,
          const std::vector<c10::Device>& places, const ddpkit::ProcessGroup& group, ddpkit::train::Run& run)
      : options_(options),
        declared_(declared),
        dataset_(dataset),
        group_(group),
        run_(run),
        train_(dataset.train.to(group.device())),
        test_(dataset.test.to(group.device())),
        share_(ddpkit::train::evaluation_share(test_.size(), group.rank(), group.world_size())),
        sampler_(static_cast<std::size_t>(dataset.train.size()), group, {.seed = options.run.seed}),
        batch_size_(static_cast<std::int64_t>(options.run.batch_size * places.size())),
        updates_(updates_of(sampler_.num_samples())),
        model_(make_model()),
        devices_(make_devices(options, places, model_, group)),
        optimizer_(make_optimizer(options, model_->parameters())),
        metrics_(dataset.classes()) {}

  void run() {
    run_.start({.model = *model_,
                .optimizer = *optimizer_,
                .wrapper = devices_->wrapper(),
                .model_name = declared_.text("mode"),
                .optimizer_name = options_.optimizer,
                .updates_per_epoch = updates_,
                .state = {ddpkit::train::checkpoint_part("sampler", sampler_),
                          ddpkit::train::checkpoint_part("metrics", metrics_, /*of_each_rank=*/true)},
                .facts_that_may_differ = {"world_size", "devices"}},
               {{"data_set", dataset_.name},
                {"train_windows", dataset_.train.size()},
                {"channels", dataset_.channels()},
                {"steps", dataset_.steps()},
                {"classes", dataset_.classes()},
                {"devices", run_.devices()}});
    if (run_.is_resumed()) {
      // On another number of devices an epoch has another number of updates. The schedule continues from the same
      // fraction of the run.
      sampler_.set_epoch(static_cast<std::uint64_t>(run_.epoch()));
      run_.scheduler().set_step((run_.epoch() + 1) * updates_ - updates_of(sampler_.indices().size()));
    }
    while (run_.has_epoch() && train_epoch()) run_.save();
    if (!run_.finish()) return;
    const ClassificationResult test = evaluated_ ? *evaluated_ : evaluate();
    run_.print(ddpkit::train::confusion_table(test, dataset_.class_names));
    run_.print_summary(fmt::format("test accuracy {:.1f} %", 100 * test.accuracy));
  }

 private:
  // Returns the updates that `samples` of this rank make.
  std::int64_t updates_of(std::size_t samples) const {
    const std::int64_t batches = (static_cast<std::int64_t>(samples) + batch_size_ - 1) / batch_size_;
    return (batches + options_.run.grad_accum_steps - 1) / options_.run.grad_accum_steps;
  }

  std::int64_t test_batches() const { return (share_.size() + kTestBatch - 1) / kTestBatch; }  // Of this rank.

  std::shared_ptr<Classifier> make_model() const {
    run_.print_batches((static_cast<std::int64_t>(sampler_.num_samples()) + batch_size_ - 1) / batch_size_,
                       test_batches(), "Test");
    return run_.make_model([&] {
      return har::make_model({.mode = options_.mode,
                              .channels = dataset_.channels(),
                              .steps = dataset_.steps(),
                              .classes = dataset_.classes(),
                              .dropout = options_.dropout});
    });
  }

  // `number`: index of the batch in the epoch, in this process.
  Batch make_batch(const at::Tensor& indices, std::int64_t number) const {
    const std::int64_t begin = number * batch_size_;
    const at::Tensor rows = indices.slice(0, begin, begin + batch_size_).to(group_.device());
    return {.windows = train_.windows.index_select(0, rows), .labels = train_.labels.index_select(0, rows)};
  }

  // Returns false if the epoch is not complete: see Epoch::next().
  bool train_epoch() {
    sampler_.set_epoch(static_cast<std::uint64_t>(run_.epoch()));
    const std::vector<std::size_t> order = sampler_.indices();
    // A run that resumes within an epoch also restores its sums, if the number of ranks is the same.
    if (ddpkit::train::seed_epoch(options_.run.seed, run_.epoch(), group_.rank()))
      metrics_ = ClassificationMetrics(dataset_.classes());
    const at::Tensor indices = torch::tensor(std::vector<std::int64_t>(order.begin(), order.end()));
    model_->train();
    evaluated_.reset();
    const auto samples = static_cast<std::int64_t>(order.size());
    ddpkit::Prefetcher<Batch> loader((samples + batch_size_ - 1) / batch_size_,
                                     [&](std::int64_t number) { return make_batch(indices, number); },
                                     {.num_workers = options_.run.num_workers});
    ddpkit::train::Epoch epoch(run_, updates_of(order.size()), samples * group_.world_size(), "samples");
    std::int64_t used = 0;
    while (epoch.next()) {
      std::vector<Batch> parts;
      for (int i = 0; i < options_.run.grad_accum_steps; ++i) {
        if (auto batch = loader.next()) parts.push_back(std::move(*batch));
      }
      train_step(parts);
      for (const Batch& part : parts) used += part.size();
      sampler_.set_position(static_cast<std::size_t>(used));
      epoch.advance([&] { return metrics_.note(); });
    }
    const ClassificationResult train = metrics_.reduce(group_);
    if (!epoch.finish(train.loss)) return false;
    sampler_.set_epoch(static_cast<std::uint64_t>(run_.epoch()));
    evaluated_ = evaluate();
    report(epoch, train, *evaluated_);
    return true;
  }

  // Makes one update with the mean loss over the samples of all `batches`, on all devices of all ranks.
  void train_step(const std::vector<Batch>& batches) {
    const auto samples = std::accumulate(batches.begin(), batches.end(), std::int64_t{0},
                                         [](std::int64_t sum, const Batch& batch) { return sum + batch.size(); });
    optimizer_->zero_grad();
    at::Tensor mean;
    for (const Batch& batch : batches) {
      // Each sample has the same weight, also in the last batch of an epoch, which may be smaller.
      const double share = static_cast<double>(batch.size()) / static_cast<double>(samples);
      const Devices::Loss loss = [&](const Devices::Forward& forward, const Batch& part) {
        const ddpkit::optim::Autocast autocast = run_.autocast(part.windows.device());
        const at::Tensor logits = forward(part.windows);
        metrics_.add_predictions(logits, part.labels);
        return run_.scaler().scale(torch::cross_entropy_loss(logits, part.labels) * share);
      };
      const at::Tensor part = devices_->backward(batch, loss, &batch == &batches.back()) / run_.scaler().get_scale();
      mean = mean.defined() ? mean + part : part;
    }
    metrics_.add_loss(mean, samples);
    run_.step_optimizer();
  }

  // Evaluates each test window once, each on one rank.
  ClassificationResult evaluate() {
    const ddpkit::train::EvaluationScope scope(*model_, group_);
    ClassificationMetrics metrics(dataset_.classes());
    ddpkit::train::ProgressBar bar = run_.bar(run_.epoch(), "Test", test_batches());
    for (std::int64_t begin = share_.begin; begin < share_.end; begin += kTestBatch) {
      const std::int64_t end = std::min(begin + kTestBatch, share_.end);
      const at::Tensor targets = test_.labels.slice(0, begin, end);
      const at::Tensor logits = model_->forward(test_.windows.slice(0, begin, end));
      metrics.add(logits, targets, torch::cross_entropy_loss(logits, targets));
      bar.advance();
    }
    return metrics.reduce(group_);
  }

  void report(ddpkit::train::Epoch& epoch, const ClassificationResult& train, const ClassificationResult& test) {
    epoch.report(fmt::format("Train {} | Test {}, F1: {:.4f} | {:.1f} s, {:.0f} samples/s", train.line(), test.line(),
                             test.macro_f1(), epoch.seconds(), epoch.items_per_second()),
                 {{"train_loss", train.loss},
                  {"train_accuracy", train.accuracy},
                  {"test_loss", test.loss},
                  {"test_accuracy", test.accuracy},
                  {"test_macro_f1", test.macro_f1()},
                  {"test_f1", test.f1()},
                  {"test_confusion", test.confusion}},
                 {{"loss/train", train.loss},
                  {"loss/test", test.loss},
                  {"accuracy/train", train.accuracy},
                  {"accuracy/test", test.accuracy},
                  {"f1/test", test.macro_f1()},
                  {"training/samples_per_second", epoch.items_per_second()}});
    run_.write_file("confusion.svg", ddpkit::train::confusion_svg(test, dataset_.class_names));
  }

  const TrainOptions& options_;
  const ddpkit::train::Options& declared_;
  const Dataset& dataset_;
  ddpkit::ProcessGroup group_;
  ddpkit::train::Run& run_;
  Split train_;
  Split test_;
  ddpkit::train::IndexRange share_;  // Test windows of this rank.
  ddpkit::DistributedSampler sampler_;
  std::int64_t batch_size_;  // Of this process, over all its devices.
  std::int64_t updates_;     // Per epoch.
  std::shared_ptr<Classifier> model_;
  std::unique_ptr<Devices> devices_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  ClassificationMetrics metrics_;                  // Of the current epoch.
  std::optional<ClassificationResult> evaluated_;  // Of the current weights.
};

}  // namespace

void train(TrainOptions& options, const ddpkit::train::Options& declared, ddpkit::train::Program& program) {
  const ddpkit::LaunchEnvironment environment = ddpkit::read_launch_environment();
  if (environment.world_size > 1 && options.multi_gpu != MultiGpu::kDdp)
    throw UsageError(
        fmt::format("--multi-gpu {} is one process, but the launcher started {}: start har without a launcher, or "
                    "use --multi-gpu ddp",
                    declared.text("multi_gpu"), environment.world_size));
  const std::vector<c10::Device> places = choose_devices(options, environment.local_rank, environment.local_world_size);
  const ddpkit::ProcessGroup group = program.join(options.run, {.device = places.front()});
  ddpkit::train::Run run(options.run, declared, group, places);
  run.print("Loading data...");
  const std::string folder = ddpkit::train::data_folder(
      options.data, "data/har", [](const std::string& path) { generate_ucihar(path, {}); }, group);
  Dataset dataset;
  ddpkit::train::run_together(group, [&] { dataset = normalised(read_recordings(folder)); });
  run.print(fmt::format("{}: {} training and {} test windows, {} channels x {} steps, {} classes", dataset.name,
                        dataset.train.size(), dataset.test.size(), dataset.channels(), dataset.steps(),
                        dataset.classes()));
  Trainer(options, declared, dataset, places, group, run).run();
}

}  // namespace har
