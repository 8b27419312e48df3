#include "har/options.h"

#include <ddpkit/train/choice.h>

namespace har {
namespace {

using ddpkit::optim::LearningRateScaling;
using ddpkit::train::add_choice;
using ddpkit::train::Choices;
using ddpkit::train::name_in;
using ddpkit::train::number_between;
using ddpkit::train::whole_number;

constexpr Choices<MultiGpu, 4> kMultiGpu = {{{"none", MultiGpu::kNone},
                                             {"dp", MultiGpu::kDp},
                                             {"ddp", MultiGpu::kDdp},
                                             {"libtorch-dp", MultiGpu::kLibTorchDp}}};
constexpr Choices<Mode, 3> kModes = {{{"cnn", Mode::kCnn}, {"flatten", Mode::kFlatten}, {"lstm", Mode::kLstm}}};
constexpr Choices<OptimizerKind, 3> kOptimizers = {
    {{"adam", OptimizerKind::kAdam}, {"adamw", OptimizerKind::kAdamW}, {"sgd", OptimizerKind::kSgd}}};
constexpr Choices<LrSchedule, 2> kSchedules = {{{"constant", LrSchedule::kConstant}, {"cosine", LrSchedule::kCosine}}};
constexpr Choices<LearningRateScaling, 3> kScalings = {{{"none", LearningRateScaling::kNone},
                                                        {"linear", LearningRateScaling::kLinear},
                                                        {"sqrt", LearningRateScaling::kSquareRoot}}};

CLI::Validator share(double most = 1) { return number_between(0, most); }
CLI::Validator count(int least) { return whole_number(least, 1'000'000); }

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
  ddpkit::train::add_checkpoint_options(app, options.trainer);

  const std::string devices = "Devices";
  add_choice(app, "--multi-gpu", options.multi_gpu, kMultiGpu,
             "none: one device; dp: one process, one replica per device; ddp: one rank per device, under a launcher; "
             "libtorch-dp: LibTorch's data_parallel on GPUs, for comparison")
      ->group(devices);
  app.add_option("--gpu-ids", options.gpu_ids, "GPUs to use, such as 0,1,3 [all]")
      ->delimiter(',')
      ->check(whole_number(0, 1023))
      ->capture_default_str()
      ->type_name("N,...")
      ->group(devices);
  app.add_option("--replicas", options.replicas, "CPU replicas of --multi-gpu dp [one per core]")
      ->check(count(1))
      ->type_name("N")
      ->group(devices);
  app.add_flag("--amp,!--no-amp", options.amp,
               "Mixed precision, if the device supports it efficiently: GPUs, and CPUs with bfloat16 matrix units [on]")
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
             "Scaling of --lr with the number of devices: none, linear or sqrt")
      ->group(training);
  app.add_option("--warmup-epochs", options.warmup_epochs, "Epochs of learning rate warm-up")
      ->check(count(0))
      ->type_name("N")
      ->group(training);
  app.add_option("--grad-accum-steps", options.grad_accum_steps, "Batches per device and update")
      ->check(count(1))
      ->type_name("N")
      ->group(training);
  app.add_option("--num-workers", options.num_workers, "Threads per rank that prepare batches")
      ->check(whole_number(0, 256))
      ->type_name("N")
      ->group(training);

  const std::string model = "Model";
  add_choice(app, "--mode", options.mode, kModes, "cnn, lstm or flatten (a perceptron on flattened windows)")
      ->group(model);
  app.add_option("--dropout", options.dropout, "Dropout probability")->check(share(0.95))->type_name("X")->group(model);

  const std::string run = "Run";
  CLI::Option* save_dir = app.get_option("--save-dir");
  app.add_flag("--profile", options.profile, "Write SAVE_DIR/trace.json of all ranks: open it in ui.perfetto.dev")
      ->needs(save_dir)
      ->group(run);
  app.add_flag("--tensorboard", options.tensorboard, "Write events to SAVE_DIR/tensorboard")
      ->needs(save_dir)
      ->group(run);
}

}  // namespace har
