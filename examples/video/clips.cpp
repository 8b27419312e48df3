#include "video/clips.h"

#include <ATen/ATen.h>

#include <ddpkit/train/seed.h>

#include "video/check.h"

namespace video {

Clips load_clips(const TrialSet& set, const std::vector<std::size_t>& trials, ClipLoader& loader,
                 const std::optional<Variation>& variation, bool repeat_frame) {
  const auto batch = static_cast<std::int64_t>(trials.size());
  const std::int64_t frames = loader.options().frames;
  const FrameSize size = loader.options().size;
  Clips clips{.pixels = at::empty({batch, frames, size.height, size.width}, at::kByte),
              .labels = at::empty({batch}, at::kLong),
              .augmentations = {}};
  auto* pixels = clips.pixels.mutable_data_ptr<std::uint8_t>();
  auto* labels = clips.labels.mutable_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < batch; ++i) {
    const std::size_t number = trials[static_cast<std::size_t>(i)];
    const Trial& trial = set.trials[number];
    Augmentation drawn;
    if (variation) {
      // Depends on the trial's line only, not on the rest of the file.
      drawn =
          draw_augmentation(ddpkit::train::epoch_seed(variation->seed, variation->epoch, static_cast<int>(trial.line)));
      if (variation->augment) clips.augmentations.push_back(drawn);
    }
    loader.load(trial.video, clip_start(trial, frames, drawn.start), pixels + i * loader.clip_bytes());
    labels[i] = trial.label;
  }
  if (repeat_frame) clips.pixels = clips.pixels.narrow(1, frames / 2, 1).expand_as(clips.pixels).contiguous();
  return clips;
}

}  // namespace video
