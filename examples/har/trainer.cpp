#include "har/trainer.h"

#include <torch/torch.h>

#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/ddpkit.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/run.h>
#include <ddpkit/train/together.h>

#include "har/dataset.h"
#include "har/devices.h"
#include "har/generate.h"

namespace har {
namespace {

using ddpkit::train::ClassificationMetrics;
using ddpkit::train::ClassificationResult;

constexpr std::int64_t kTestBatch = 256;

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

Dataset read_data(const TrainOptions& options, const ddpkit::ProcessGroup& group, const ddpkit::train::Run& run) {
  run.print("Loading data...");
  const std::string folder = ddpkit::train::data_folder(
      options.data, "data/har", [](const std::string& path) { generate_ucihar(path, {}); }, group);
  Dataset data;
  ddpkit::train::run_together(group, [&] { data = normalised(read_recordings(folder)); });
  run.print(fmt::format("{}: {} training and {} test windows, {} channels x {} steps, {} classes", data.name,
                        data.train.size(), data.test.size(), data.channels(), data.steps(), data.classes()));
  return data;
}

// Makes one update with the mean loss over the samples of all `batches`, on all devices of all ranks.
void make_update(const std::vector<Split>& batches, Devices& devices, ddpkit::train::Run& run,
                 torch::optim::Optimizer& optimizer, ClassificationMetrics& metrics) {
  std::int64_t samples = 0;
  for (const Split& batch : batches) samples += batch.size();
  optimizer.zero_grad();
  at::Tensor mean;
  std::mutex mutex;
  std::vector<std::pair<at::Tensor, at::Tensor>> predictions;  // Logits and labels.
  for (const Split& batch : batches) {
    // Each sample has the same weight, also in the last batch of an epoch, which may be smaller.
    const double share = static_cast<double>(batch.size()) / static_cast<double>(samples);
    const Devices::Loss loss = [&](const Devices::Forward& forward, const Split& part) {
      const ddpkit::optim::Autocast autocast = run.autocast(part.windows.device());
      const at::Tensor logits = forward(part.windows);
      {
        const std::lock_guard lock(mutex);  // The replicas of DataParallel are threads.
        predictions.emplace_back(logits.detach(), part.labels);
      }
      return run.scaler().scale(torch::cross_entropy_loss(logits, part.labels) * share);
    };
    const at::Tensor part = devices.backward(batch, loss, &batch == &batches.back()) / run.scaler().get_scale();
    mean = mean.defined() ? mean + part : part;
  }
  run.step_optimizer();
  for (const auto& [logits, labels] : predictions) metrics.add_predictions(logits, labels);
  metrics.add_loss(mean, samples);
}

// Evaluates each test window once, on one rank.
ClassificationResult evaluate(Classifier& model, const Split& test, std::int64_t classes,
                              const ddpkit::ProcessGroup& group, const ddpkit::train::Run& run) {
  const ddpkit::train::EvaluationScope scope(model, group);
  ClassificationMetrics metrics(classes);
  const auto share = ddpkit::train::evaluation_share(test.size(), group.rank(), group.world_size());
  ddpkit::train::ProgressBar bar = run.bar(run.epoch(), "Test", (share.size() + kTestBatch - 1) / kTestBatch);
  for (std::int64_t begin = share.begin; begin < share.end; begin += kTestBatch) {
    const Split part = test.slice(begin, std::min(begin + kTestBatch, share.end));
    const at::Tensor logits = model.forward(part.windows);
    metrics.add(logits, part.labels, torch::cross_entropy_loss(logits, part.labels));
    bar.advance();
  }
  return metrics.reduce(group);
}

}  // namespace

void train(TrainOptions& options, const ddpkit::train::Options& declared, ddpkit::train::Program& program) {
  const std::vector<c10::Device> places = choose_devices(options, declared);
  const ddpkit::ProcessGroup group = program.join(options.run, {.device = places.front()});
  ddpkit::train::Run run(options.run, declared, group, places);
  const Dataset data = read_data(options, group, run);
  const Split train = data.train.to(group.device()), test = data.test.to(group.device());
  ddpkit::DistributedSampler sampler(static_cast<std::size_t>(train.size()), group, {.seed = options.run.seed});
  const auto share = ddpkit::train::evaluation_share(test.size(), group.rank(), group.world_size());
  run.print_batches(run.batches_of(sampler.num_samples()), (share.size() + kTestBatch - 1) / kTestBatch, "Test");
  const std::shared_ptr<Classifier> model = run.make_model([&] {
    return make_model({.mode = options.mode,
                       .channels = data.channels(),
                       .steps = data.steps(),
                       .classes = data.classes(),
                       .dropout = options.dropout});
  });
  const std::unique_ptr<Devices> devices = make_devices(options, places, model, group);
  const auto optimizer = make_optimizer(options, model->parameters());
  ClassificationMetrics metrics(data.classes());  // Of the current epoch.
  run.start({.model = *model,
             .optimizer = *optimizer,
             .wrapper = devices->wrapper(),
             .model_name = declared.text("mode"),
             .optimizer_name = options.optimizer,
             .sampler = &sampler,
             .state = {ddpkit::train::checkpoint_part("metrics", metrics, /*of_each_rank=*/true)},
             .facts_that_may_differ = {"world_size", "devices"}},
            {{"data_set", data.name},
             {"train_windows", data.train.size()},
             {"channels", data.channels()},
             {"steps", data.steps()},
             {"classes", data.classes()},
             {"devices", run.devices()}});

  std::optional<ClassificationResult> tested;  // With the current weights.
  while (run.has_epoch()) {
    ddpkit::train::Epoch epoch(run, "samples");
    if (epoch.is_new()) metrics = ClassificationMetrics(data.classes());
    const auto make_batch = [&](std::int64_t number) {
      return train.rows(torch::tensor(epoch.batch(number)).to(group.device()));
    };
    ClassificationResult trained;
    tested.reset();
    epoch.retry([&] {
      ddpkit::Prefetcher<Split> loader(epoch.batches(), make_batch, {.num_workers = options.run.num_workers});
      model->train();
      while (epoch.next()) {
        std::vector<Split> batches;
        for (int i = 0; i < options.run.grad_accum_steps; ++i) {
          if (auto batch = loader.next()) batches.push_back(std::move(*batch));
        }
        make_update(batches, *devices, run, *optimizer, metrics);
        epoch.advance([&] { return metrics.note(); });
      }
      trained = metrics.reduce(group);
    });
    if (!epoch.finish(trained.loss)) break;
    run.retry([&] { tested = evaluate(*model, test, data.classes(), group, run); });
    epoch.report(trained, *tested, "test", "Test", data.class_names,
                 fmt::format("{:.1f} s, {:.0f} samples/s", epoch.seconds(), epoch.items_per_second()), {});
    run.save();
  }
  if (!run.finish()) return;
  if (!tested) run.retry([&] { tested = evaluate(*model, test, data.classes(), group, run); });
  run.print(ddpkit::train::confusion_table(*tested, data.class_names));
  run.print_summary(fmt::format("test accuracy {:.1f} %", 100 * tested->accuracy));
}

}  // namespace har
