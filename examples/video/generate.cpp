#include "video/generate.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/data/prefetcher.h>
#include <ddpkit/error.h>
#include <ddpkit/train/atomic_file.h>
#include <ddpkit/train/progress.h>
#include <ddpkit/train/random.h>
#include <ddpkit/train/seed.h>

#include "new_folder.h"
#include "video/scene.h"
#include "video/video_writer.h"

namespace video {
namespace {

namespace fs = std::filesystem;

using ddpkit::train::write_text;

// Returns the lines of trials.csv for this video.
std::string make_video(const fs::path& root, int number, const std::vector<Behaviour>& trials,
                       const GenerateOptions& options) {
  ddpkit::train::Random random(ddpkit::train::epoch_seed(options.seed, number, 1));
  const std::string name = fmt::format("videos/{:03}.mp4", number);
  Scene scene(options.size, random);
  VideoWriter writer(root / name,
                     {.size = options.size, .keyframe_interval = options.keyframe_interval, .codec = options.codec});
  std::vector<std::uint8_t> pixels(static_cast<std::size_t>(options.size.pixels()));
  std::int64_t frame = 0;
  const auto show = [&](const Pose& pose) {
    scene.render(pose, random, pixels.data());
    writer.write(pixels.data());
    ++frame;
  };
  std::string lines;
  Pose last;
  for (std::size_t trial = 0; trial < trials.size(); ++trial) {
    const Motion motion(trials[trial], options.trial_frames, random);
    const std::int64_t gap = 3 + random.below(6);
    if (trial == 0) last = motion.at(0);
    for (std::int64_t i = 1; i <= gap; ++i)
      show(between(last, motion.at(0), static_cast<double>(i) / static_cast<double>(gap + 1)));
    lines += fmt::format("{},{},{},{}\n", name, frame, frame + options.trial_frames - 1,
                         kBehaviours[static_cast<std::size_t>(trials[trial])].name);
    for (int i = 0; i < options.trial_frames; ++i) show(motion.at(i));
    last = motion.at(options.trial_frames - 1);
  }
  for (int i = 0; i < 3; ++i) show(last);
  writer.finish();
  return lines;
}

}  // namespace

std::vector<int> trials_of_classes(int trials, int least) {
  std::vector<int> counts;
  std::vector<std::pair<double, std::size_t>> remainders;
  for (std::size_t k = 0; k < kBehaviours.size(); ++k) {
    const double share = trials * kBehaviours[k].percent / 100;
    counts.push_back(static_cast<int>(share));
    remainders.emplace_back(counts.back() - share, k);
  }
  std::sort(remainders.begin(), remainders.end());
  for (int i = 0; std::accumulate(counts.begin(), counts.end(), 0) < trials; ++i)
    ++counts[remainders[static_cast<std::size_t>(i)].second];
  for (std::size_t k = 1; k < counts.size(); ++k) {
    counts[0] -= std::max(0, least - counts[k]);
    counts[k] = std::max(counts[k], least);
  }
  if (counts[0] < std::max(1, least))
    throw ddpkit::InvalidArgument(
        fmt::format("{} trials are too few for {} classes of at least {}", trials, counts.size(), least));
  return counts;
}

void generate(const fs::path& folder, const GenerateOptions& options) {
  if (options.videos < 1 || options.trials < options.videos || options.trial_frames < 1)
    throw ddpkit::InvalidArgument(
        fmt::format("cannot generate {} trials of {} frames in {} videos: at least one video, one trial in each, and "
                    "one frame",
                    options.trials, options.trial_frames, options.videos));
  const std::vector<int> counts = trials_of_classes(options.trials, options.least_of_class);
  std::vector<Behaviour> all;
  for (std::size_t k = 0; k < counts.size(); ++k)
    all.insert(all.end(), static_cast<std::size_t>(counts[k]), static_cast<Behaviour>(k));
  ddpkit::train::Random random(options.seed);
  random.shuffle(all);
  std::vector<std::vector<Behaviour>> dealt(static_cast<std::size_t>(options.videos));
  for (std::size_t i = 0; i < all.size(); ++i) dealt[i % dealt.size()].push_back(all[i]);

  write_new_folder(folder, [&](const fs::path& path) {
    fs::create_directories(path / "videos");
    ddpkit::Prefetcher<std::string> videos(
        options.videos,
        [&](std::int64_t number) {
          return make_video(path, static_cast<int>(number), dealt[static_cast<std::size_t>(number)], options);
        },
        {.num_workers = options.threads > 0 ? options.threads : ddpkit::available_cores()});
    ddpkit::train::ProgressBar bar(options.videos, {.label = "videos"});
    std::string csv = "video,start_frame,end_frame,label\n";
    while (const auto lines = videos.next()) {
      csv += *lines;
      bar.advance();
    }
    bar.clear();
    write_text(path / "trials.csv", csv);
    std::string names;
    for (const BehaviourClass& behaviour : kBehaviours) names += fmt::format("{}\n", behaviour.name);
    write_text(path / "classes.txt", names);
  });
}

}  // namespace video
