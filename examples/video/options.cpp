#include "video/options.h"

#include <fmt/format.h>

#include <ddpkit/train/choice.h>
#include <ddpkit/train/csv.h>

namespace video {
namespace {

using ddpkit::optim::LearningRateScaling;
using ddpkit::train::add_choice;
using ddpkit::train::Choices;
using ddpkit::train::name_in;
using ddpkit::train::number_between;
using ddpkit::train::parse_whole_number;
using ddpkit::train::whole_number;

constexpr Choices<Balance, 3> kBalances = {
    {{"none", Balance::kNone}, {"loss", Balance::kLoss}, {"sampler", Balance::kSampler}}};
constexpr Choices<LearningRateScaling, 3> kScalings = {{{"none", LearningRateScaling::kNone},
                                                        {"linear", LearningRateScaling::kLinear},
                                                        {"sqrt", LearningRateScaling::kSquareRoot}}};
constexpr Choices<OnBadData, 2> kPolicies = {{{"stop", OnBadData::kStop}, {"skip", OnBadData::kSkip}}};
constexpr Choices<Check, 2> kChecks = {{{"index", Check::kIndex}, {"decode", Check::kDecode}}};

CLI::Validator count(int least) { return whole_number(least, 1'000'000); }
CLI::Validator share(double most = 1) { return number_between(0, most); }

CLI::Option* add_size(CLI::App& app, FrameSize& size, const std::string& description) {
  const auto parse = [&size](const std::string& text) {
    const std::size_t cross = text.find('x');
    const auto width = parse_whole_number(text.substr(0, cross));
    const auto height = cross == std::string::npos ? width : parse_whole_number(text.substr(cross + 1));
    if (!width || !height || *width < 16 || *height < 16 || *width > 4096 || *height > 4096)
      throw CLI::ValidationError("--size", "must be WIDTHxHEIGHT or one number for both, 16 to 4096, not " + text);
    size = {static_cast<int>(*width), static_cast<int>(*height)};
  };
  return app.add_option_function<std::string>("--size", parse, description)
      ->type_name("WxH")
      ->default_str(name_of(size));
}

}  // namespace

const char* name_of(Balance value) { return name_in(kBalances, value); }
const char* name_of(OnBadData value) { return name_in(kPolicies, value); }
const char* name_of(Check value) { return name_in(kChecks, value); }
const char* name_of(LearningRateScaling value) { return name_in(kScalings, value); }
std::string name_of(FrameSize size) { return fmt::format("{}x{}", size.width, size.height); }

void add_train_options(CLI::App& app, TrainOptions& options) {
  app.add_option("--data", options.data, "Folder with trials.csv (video,start_frame,end_frame,label) and the videos")
      ->type_name("FOLDER");
  ddpkit::train::add_trainer_options(app, options.trainer);
  ddpkit::train::add_checkpoint_options(app, options.trainer);

  const std::string data = "Data";
  app.add_option("--classes", options.classes, "Class labels in order [FOLDER/classes.txt, else all labels, sorted]")
      ->delimiter(',')
      ->type_name("NAME,...")
      ->group(data);
  add_size(app, options.size, "Size to which frames are scaled")->group(data);
  app.add_option("--frames", options.frames, "Frames per clip")
      ->check(whole_number(1, 1024))
      ->type_name("N")
      ->group(data);
  app.add_option("--validation-share", options.validation_share, "Share of the videos to hold out")
      ->check(number_between(0.01, 0.9))
      ->type_name("X")
      ->group(data);
  add_choice(app, "--on-bad-data", options.on_bad_data, kPolicies,
             "stop at the first bad trial, or skip bad trials and list them")
      ->group(data);
  add_choice(app, "--check", options.check, kChecks,
             "Data check before training: index reads the videos' packets, decode also decodes every trial")
      ->group(data);
  app.add_flag("--repeat-frame", options.repeat_frame,
               "Control experiment: each clip repeats its middle frame, so that there is no motion")
      ->group(data);

  const std::string loading = "Loading";
  app.add_option("--num-workers", options.num_workers, "Decoding threads per rank; 0: the training thread decodes")
      ->check(whole_number(0, 256))
      ->type_name("N")
      ->group(loading);
  app.add_option("--prefetch-factor", options.prefetch_factor, "Batches that each decoding thread prepares in advance")
      ->check(whole_number(1, 1024))
      ->type_name("N")
      ->group(loading);
  app.add_option("--open-videos", options.open_videos, "Files per rank that remain open with their decoders")
      ->check(whole_number(1, 10'000))
      ->type_name("N")
      ->group(loading);
  app.add_option("--cache-dir", options.cache_dir, "Folder of the cache of decoded clips [no cache]")
      ->type_name("FOLDER")
      ->group(loading);
  app.add_option("--cache-mb", options.cache_mb, "Size limit of the cache, MiB")
      ->check(whole_number(1, 1 << 30))
      ->type_name("N")
      ->group(loading);

  const std::string training = "Training";
  add_choice(app, "--balance", options.balance, kBalances,
             "Class balancing: none, loss (weights) or sampler (rare classes are drawn more often)")
      ->group(training);
  app.add_option("--weight-decay", options.weight_decay, "Weight decay of AdamW")
      ->check(share())
      ->type_name("X")
      ->group(training);
  add_choice(app, "--lr-scaling", options.lr_scaling, kScalings,
             "Scaling of --lr with the number of ranks: none, linear or sqrt")
      ->group(training);
  app.add_option("--warmup-epochs", options.warmup_epochs, "Epochs of learning rate warm-up")
      ->check(count(0))
      ->type_name("N")
      ->group(training);
  app.add_flag("--augment,!--no-augment", options.augment, "Random mirroring, shift and brightness per clip [on]")
      ->group(training);
  app.add_flag("--sync-batch-norm", options.sync_batch_norm, "Synchronize batch norm over all ranks")->group(training);
  app.add_flag("--amp", options.amp, "Mixed precision (bfloat16 or float16), if the device supports it efficiently")
      ->group(training);

  const std::string model = "Model";
  app.add_option("--dropout", options.dropout, "Dropout probability")->check(share(0.95))->type_name("X")->group(model);
  app.add_option("--width", options.width, "Channels of the first layer; 16 makes 3 M parameters")
      ->check(whole_number(1, 256))
      ->type_name("N")
      ->group(model);

  app.add_flag("--tensorboard,!--no-tensorboard", options.tensorboard, "Write events to SAVE_DIR/tensorboard [on]")
      ->group("Run");
}

CLI::App* add_generate_command(CLI::App& app, std::string& folder, GenerateOptions& options) {
  CLI::App* generate = app.add_subcommand("generate", "Write a synthetic data set: videos, trials.csv, classes.txt");
  generate->option_defaults()->always_capture_default();
  generate->add_option("folder", folder, "New folder")->required()->type_name("FOLDER");
  generate->add_option("--videos", options.videos, "Videos")->check(count(1))->type_name("N");
  generate->add_option("--trials", options.trials, "Total number of trials")->check(count(1))->type_name("N");
  generate->add_option("--trial-frames", options.trial_frames, "Frames per trial")
      ->check(whole_number(1, 100'000))
      ->type_name("N");
  generate->add_option("--least", options.least_of_class, "Minimum number of trials per class")
      ->check(count(1))
      ->type_name("N");
  add_size(*generate, options.size, "Size of the frames");
  generate->add_option("--keyframe-interval", options.keyframe_interval, "Frames between keyframes")
      ->check(whole_number(1, 100'000))
      ->type_name("N");
  generate->add_option("--codec", options.codec, "FFmpeg's name of the encoder [libx264, else mpeg4]")
      ->type_name("NAME");
  generate->add_option("--threads", options.threads, "Threads [one per core]")
      ->check(whole_number(0, 1024))
      ->type_name("N");
  generate->add_option("--seed", options.seed, "The same seed gives the same files")
      ->check(whole_number(0))
      ->type_name("N");
  return generate;
}

}  // namespace video
