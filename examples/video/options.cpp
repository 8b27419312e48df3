#include "video/options.h"

#include <fmt/format.h>

#include <ddpkit/train/csv.h>

namespace video {
namespace {

using ddpkit::train::Options;
using ddpkit::train::parse_whole_number;

void add_size(Options& options, FrameSize& size, const std::string& help) {
  const auto parse = [&size](const std::string& text) {
    const std::size_t cross = text.find('x');
    const auto width = parse_whole_number(text.substr(0, cross));
    const auto height = cross == std::string::npos ? width : parse_whole_number(text.substr(cross + 1));
    if (!width || !height || *width < 16 || *height < 16 || *width > 4096 || *height > 4096)
      return "WIDTHxHEIGHT or one number for both, 16 to 4096";
    size = {static_cast<int>(*width), static_cast<int>(*height)};
    return "";
  };
  options.add(
      "size", parse, [&size] { return fmt::format("{}x{}", size.width, size.height); }, help);
}

}  // namespace

void declare(Options& options, TrainOptions& video) {
  options.section("data");
  options
      .add(
          "data", &video.data,
          "Folder with trials.csv (video,start_frame,end_frame,label) and the videos; by default data/mouse, generated")
      .may_differ();
  options.add("classes", &video.classes, "Class labels in order; by default FOLDER/classes.txt, else all, sorted")
      .may_differ();
  add_size(options, video.size, "Size to which frames are scaled");
  options.add("frames", &video.frames, "Frames per clip").between(1, 1024);
  options.add("validation_share", &video.validation_share, "Share of the videos to hold out").between(0.01, 0.9);
  options
      .add("on_bad_data", &video.on_bad_data, {{"stop", OnBadData::kStop}, {"skip", OnBadData::kSkip}},
           "stop at the first bad trial, or skip bad trials and list them")
      .may_differ();
  options
      .add("check", &video.check, {{"index", Check::kIndex}, {"decode", Check::kDecode}},
           "Data check before training: index reads the videos' packets, decode also decodes every trial")
      .may_differ();
  options.add("repeat_frame", &video.repeat_frame,
              "Control experiment: each clip repeats its middle frame, so that there is no motion");
  options.add("prefetch_factor", &video.prefetch_factor, "Batches that each worker decodes in advance")
      .between(1, 1024)
      .may_differ();
  options.add("open_videos", &video.open_videos, "Files per rank that remain open with their decoders")
      .between(1, 10'000)
      .may_differ();
  options.add("cache_dir", &video.cache_dir, "Folder of the cache of decoded clips; by default none").may_differ();
  options.add("cache_mb", &video.cache_mb, "Size limit of the cache, MiB").between(1, 1 << 30).may_differ();
  options.section("model");
  options.add("dropout", &video.dropout, "Dropout probability").between(0, 0.95);
  options.add("width", &video.width, "Channels of the first layer; 16 makes 3 M parameters").between(1, 256);
  options.section("training");
  options.add("balance", &video.balance,
              {{"none", Balance::kNone}, {"loss", Balance::kLoss}, {"sampler", Balance::kSampler}},
              "Class balancing: none, loss (weights) or sampler (rare classes are drawn more often)");
  options.add("augment", &video.augment, "Random mirroring, shift and brightness per clip");
  ddpkit::train::declare(options, video.run);
  options.at("batch_size").help("Clips per batch on each device; on the CPU 8 by default");
  options.at("num_workers").help("Threads per rank that decode; 0: the training thread decodes");
  options.remove({"lr_schedule", "max_grad_norm", "grad_accum_steps", "num_gpus", "logging_steps"});
}

void declare(Options& options, std::string& folder, GenerateOptions& set) {
  options.add("folder", &folder, "New folder").positional().required();
  options.add("videos", &set.videos, "Videos").between(1, 1e6);
  options.add("trials", &set.trials, "Total number of trials").between(1, 1e6);
  options.add("trial_frames", &set.trial_frames, "Frames per trial").between(1, 1e5);
  options.add("least", &set.least_of_class, "Minimum number of trials per class").between(1, 1e6);
  add_size(options, set.size, "Size of the frames");
  options.add("keyframe_interval", &set.keyframe_interval, "Frames between keyframes").between(1, 1e5);
  options.add("codec", &set.codec, "FFmpeg's name of the encoder; by default libx264, else mpeg4");
  options.add("threads", &set.threads, "Threads; 0: one per core").between(0, 1024);
  options.add("seed", &set.seed, "The same seed gives the same files");
}

}  // namespace video
