#include "asr/options.h"

#include <fmt/format.h>

#include <ddpkit/train/main.h>

namespace asr {
namespace {

using ddpkit::optim::LearningRateScaling;
using ddpkit::train::Config;
using Range = Config::Range;

const Range kAny = {.least = 0};
const Range kCount = {.least = 1, .most = 1e9};
const Range kShare = {.least = 0, .most = 1};

void read_data(Config& config, DataOptions& data) {
  config.read("data.train", data.train);
  config.read("data.dev", data.dev);
  config.read("data.test", data.test);
  config.read("data.include", data.include);
  config.read("data.workers", data.workers, {.least = 0, .most = 256});
  config.read("data.cache_mb", data.cache_mb, {.least = 0, .most = 1e7});
  std::string policy = "stop";
  config.read("data.on_error", policy, {"stop", "skip"});
  data.on_error = policy == "skip" ? FaultPolicy::kSkip : FaultPolicy::kStop;
}

void read_features(Config& config, FeatureOptions& features) {
  config.read("features.sample_rate", features.sample_rate, {.least = 1000, .most = 1e6});
  config.read("features.window_ms", features.window_ms, {.least = 1, .most = 1000});
  config.read("features.hop_ms", features.hop_ms, {.least = 1, .most = 1000});
  config.read("features.mels", features.mels, {.least = 1, .most = 1000});
}

void read_model(Config& config, ModelOptions& model) {
  config.read("model.width", model.width, {.least = 1, .most = 65536});
  config.read("model.kernel", model.kernel, {.least = 1, .most = 1000});
  config.read("model.strides", model.strides, {.least = 1, .most = 100});
  config.read("model.batch_norm", model.batch_norm);
  config.read("model.layers", model.layers, {.least = 1, .most = 1000});
  config.read("model.memory_channels", model.memory_channels, {.least = 1, .most = 65536});
  config.read("model.order", model.order, {.least = 1, .most = 512});
  config.read("model.theta", model.theta, {.least = 1, .most = 1e6});
  config.read("model.dropout", model.dropout, {.least = 0, .most = 0.95});
}

void read_training(Config& config, TrainingOptions& training) {
  config.read("training.epochs", training.epochs, kCount);
  config.read("training.batch_size", training.batch_size, kCount);
  config.read("training.lr", training.lr, {.least = 1e-12, .most = 1e30});
  std::string scaling = "linear";
  config.read("training.lr_scaling", scaling, {"linear", "sqrt", "none"});
  training.lr_scaling = scaling == "linear" ? LearningRateScaling::kLinear
                        : scaling == "sqrt" ? LearningRateScaling::kSquareRoot
                                            : LearningRateScaling::kNone;
  config.read("training.warmup_epochs", training.warmup_epochs, {.least = 0, .most = 1e9});
  config.read("training.schedule", training.schedule, {"cosine", "constant"});
  config.read("training.weight_decay", training.weight_decay, kShare);
  config.read("training.clip_norm", training.clip_norm, kAny);
  config.read("training.amp", training.amp);
  config.read("training.seed", training.seed);
  config.read("training.max_steps", training.max_steps, kCount);
  config.read("training.checkpoint_steps", training.checkpoint_steps, {.least = 0, .most = 1e9});
  config.read("training.spec_augment.enabled", training.spec_augment);
  config.read("training.spec_augment.time_masks", training.spec.time_masks, {.least = 0, .most = 1000});
  config.read("training.spec_augment.time_width", training.spec.time_width, {.least = 0, .most = 1e6});
  config.read("training.spec_augment.time_share", training.spec.time_share, kShare);
  config.read("training.spec_augment.frequency_masks", training.spec.frequency_masks, {.least = 0, .most = 1000});
  config.read("training.spec_augment.frequency_width", training.spec.frequency_width, {.least = 0, .most = 1000});
}

}  // namespace

Options read_options(Config& config) {
  Options options;
  read_data(config, options.data);
  read_features(config, options.features);
  read_model(config, options.model);
  read_training(config, options.training);
  DistributedOptions& distributed = options.distributed;
  config.read("distributed.enabled", distributed.enabled);
  config.read("distributed.backend", distributed.backend);
  // Empty in the checkpoint of a run without this option.
  if (!distributed.backend.empty())
    config.read("distributed.backend", distributed.backend, {"auto", "shm", "gloo", "nccl", "hierarchical"});
  if (distributed.backend == "auto") distributed.backend.clear();
  config.read("distributed.find_unused_parameters", distributed.find_unused_parameters);
  config.read("distributed.sync_batchnorm", distributed.sync_batchnorm);
  config.read("distributed.arena_mb", distributed.arena_mb, {.least = 0, .most = 1e7});
  EvaluationOptions& evaluation = options.evaluation;
  config.read("evaluation.batch_size", evaluation.batch_size, kCount);
  config.read("evaluation.every_epochs", evaluation.every_epochs, kCount);
  config.read("evaluation.decoder", evaluation.decoder, {"greedy", "beam"});
  config.read("evaluation.beam", evaluation.beam, {.least = 1, .most = 10'000});
  config.read("evaluation.samples", evaluation.samples, {.least = 0, .most = 1000});
  RunOptions& run = options.run;
  config.read("run.save_dir", run.save_dir);
  config.read("run.resume", run.resume);
  config.read("run.overwrite", run.overwrite);
  config.read("run.json", run.json);
  config.read("run.tensorboard", run.tensorboard);
  config.read("run.log_steps", run.log_steps, {.least = 0, .most = 1e9});
  config.check_all_known();
  if (options.model.strides.empty())
    throw ddpkit::train::UsageError(
        fmt::format("{}: model.strides is empty: give at least one convolution", config.where("model.strides")));
  options.model.mels = options.features.mels;
  options.model.labels = Alphabet().size();
  return options;
}

std::vector<std::string> may_differ() {
  std::vector<std::string> keys = {"data.dev",
                                   "data.test",
                                   "data.workers",
                                   "data.cache_mb",
                                   "data.on_error",
                                   "training.epochs",
                                   "training.max_steps",
                                   "training.checkpoint_steps",
                                   "distributed.enabled",
                                   "distributed.backend",
                                   "distributed.find_unused_parameters",
                                   "world_size"};
  for (const char* key : {"batch_size", "every_epochs", "decoder", "beam", "samples"})
    keys.push_back(fmt::format("evaluation.{}", key));
  for (const char* key : {"save_dir", "resume", "overwrite", "json", "tensorboard", "log_steps"})
    keys.push_back(fmt::format("run.{}", key));
  return keys;
}

}  // namespace asr
