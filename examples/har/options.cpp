#include "har/options.h"

#include <CLI/CLI.hpp>
#include <array>
#include <utility>

namespace har {
namespace {

using ddpkit::optim::LearningRateScaling;

template <class E, std::size_t N>
using Names = std::array<std::pair<const char*, E>, N>;

constexpr Names<MultiGpu, 4> kMultiGpu = {{{"none", MultiGpu::kNone},
                                           {"dp", MultiGpu::kDp},
                                           {"ddp", MultiGpu::kDdp},
                                           {"libtorch-dp", MultiGpu::kLibTorchDp}}};
constexpr Names<Mode, 3> kModes = {{{"cnn", Mode::kCnn}, {"flatten", Mode::kFlatten}, {"lstm", Mode::kLstm}}};
constexpr Names<OptimizerKind, 3> kOptimizers = {
    {{"adam", OptimizerKind::kAdam}, {"adamw", OptimizerKind::kAdamW}, {"sgd", OptimizerKind::kSgd}}};
constexpr Names<LrSchedule, 2> kSchedules = {{{"constant", LrSchedule::kConstant}, {"cosine", LrSchedule::kCosine}}};
constexpr Names<LearningRateScaling, 3> kScalings = {{{"none", LearningRateScaling::kNone},
                                                      {"linear", LearningRateScaling::kLinear},
                                                      {"sqrt", LearningRateScaling::kSquareRoot}}};

template <class E, std::size_t N>
const char* name_in(const Names<E, N>& names, E value) {
  for (const auto& [name, there] : names) {
    if (there == value) return name;
  }
  return "?";
}

template <class E, std::size_t N>
CLI::Option* add_choice(CLI::App& app, const std::string& option, E& value, const Names<E, N>& names,
                        const std::string& description) {
  const auto to_number = [&names](std::string& text) {
    std::string all;
    for (const auto& [name, there] : names) {
      if (text == name) {
        text = std::to_string(static_cast<int>(there));
        return std::string();
      }
      all += (all.empty() ? "" : ", ") + std::string(name);
    }
    return "must be one of " + all + ", not " + text;
  };
  return app.add_option(option, value, description)
      ->transform(CLI::Validator(to_number, ""))
      ->type_name("NAME")
      ->default_str(name_in(names, value));
}

CLI::Range share(double most = 1) { return {0.0, most}; }
CLI::Range count(int least) { return {least, 1'000'000}; }

}  // namespace

const char* name_of(MultiGpu value) { return name_in(kMultiGpu, value); }
const char* name_of(Mode value) { return name_in(kModes, value); }
const char* name_of(OptimizerKind value) { return name_in(kOptimizers, value); }
const char* name_of(LrSchedule value) { return name_in(kSchedules, value); }
const char* name_of(LearningRateScaling value) { return name_in(kScalings, value); }

void add_train_options(CLI::App& app, TrainOptions& options) {
  app.add_option("--data", options.data, "Folder in the UCI-HAR layout, or with NAME_TRAIN.ts and NAME_TEST.ts")
      ->type_name("FOLDER");
  ddpkit::train::add_trainer_options(app, options.trainer);

  const std::string devices = "Devices";
  add_choice(
      app, "--multi-gpu", options.multi_gpu, kMultiGpu,
      "none: one device; dp: one process, a replica a device; ddp: a rank a device, under a launcher; libtorch-dp: "
      "LibTorch's data_parallel on GPUs, for comparison")
      ->group(devices);
  app.add_option("--gpu-ids", options.gpu_ids, "GPUs to use, such as 0,1,3 [all]")
      ->delimiter(',')
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->type_name("N,...")
      ->group(devices);
  app.add_option("--replicas", options.replicas, "CPU replicas of --multi-gpu dp [one a core]")
      ->check(count(1))
      ->type_name("N")
      ->group(devices);
  app.add_flag("--amp,!--no-amp", options.amp,
               "Mixed precision, where the device gains by it: on GPUs, and on CPUs with bfloat16 matrix units [on]")
      ->group(devices);

  const std::string training = "Training";
  add_choice(app, "--optimizer", options.optimizer, kOptimizers, "adamw, adam or sgd")->group(training);
  app.add_option("--weight-decay", options.weight_decay, "Weight decay")
      ->check(share())
      ->type_name("X")
      ->group(training);
  app.add_option("--momentum", options.momentum, "Momentum of sgd")->check(share())->type_name("X")->group(training);
  add_choice(app, "--lr-schedule", options.lr_schedule, kSchedules, "cosine (down to 0 at the end) or constant")
      ->group(training);
  add_choice(app, "--lr-scaling", options.lr_scaling, kScalings,
             "How --lr grows with the number of devices: none, linear or sqrt")
      ->group(training);
  app.add_option("--warmup-epochs", options.warmup_epochs, "Epochs in which the learning rate rises from a small one")
      ->check(count(0))
      ->type_name("N")
      ->group(training);
  app.add_option("--grad-accum-steps", options.grad_accum_steps, "Batches whose gradients make one update")
      ->check(count(1))
      ->type_name("N")
      ->group(training);
  app.add_option("--num-workers", options.num_workers, "Threads a rank that put batches together ahead of the model")
      ->check(CLI::Range(0, 256))
      ->type_name("N")
      ->group(training);

  const std::string model = "Model";
  add_choice(app, "--mode", options.mode, kModes, "cnn, lstm or flatten (a perceptron on flattened windows)")
      ->group(model);
  app.add_option("--dropout", options.dropout, "Share of features dropped while training")
      ->check(share(0.95))
      ->type_name("X")
      ->group(model);

  const std::string run = "Run";
  CLI::Option* save_dir = app.get_option("--save-dir");
  app.add_flag("--profile", options.profile, "Leave SAVE_DIR/trace.json of all ranks: open it in ui.perfetto.dev")
      ->needs(save_dir)
      ->group(run);
  app.add_flag("--tensorboard", options.tensorboard, "Leave events in SAVE_DIR/tensorboard")
      ->needs(save_dir)
      ->group(run);
}

}  // namespace har
