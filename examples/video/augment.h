// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace video {

/// Of a prepared clip: brightness, and change from frame to frame.
inline constexpr std::int64_t kClipChannels = 2;

/// How one clip of one epoch is varied. The behaviours look the same mirrored and anywhere in the frame.
struct Augmentation {
  bool mirror_x = false;
  bool mirror_y = false;
  double shift_x = 0;  ///< Share of the width; what comes in repeats the edge.
  double shift_y = 0;
  double gain = 1;     ///< Of the contrast to mid-grey.
  double offset = 0;   ///< Of the brightness, 1 = from black to white.
  double start = 0.5;  ///< Where in its trial the clip begins, see clip_start().
};

/// Drawn from `seed` alone (train::epoch_seed of the run's seed, the epoch and the trial): the same on any number of
/// ranks, and in a resumed run.
Augmentation draw_augmentation(std::uint64_t seed);

/// What the model takes of clips as they were decoded: on the device, in one pass over the bytes.
/// `pixels` [batch, frames, height, width] uint8; `augmentations` one a clip, or empty for none.
/// Returns float32 [batch, 2, frames, height, width]: brightness from -1 to 1, and 4 times its change since the frame
/// before (0 in the first), which is about as large.
at::Tensor prepare_clips(const at::Tensor& pixels, const std::vector<Augmentation>& augmentations);

}  // namespace video
