// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace video {

/// Channels of a prepared clip: brightness, and change between frames.
inline constexpr std::int64_t kClipChannels = 2;

/// The augmentation of one clip in one epoch. Behaviours do not depend on mirroring or position.
struct Augmentation {
  bool mirror_x = false;
  bool mirror_y = false;
  double shift_x = 0;  ///< Share of the width; the edge is repeated.
  double shift_y = 0;
  double gain = 1;     ///< Factor of the contrast around mid-grey.
  double offset = 0;   ///< Added to the brightness; 1 = from black to white.
  double start = 0.5;  ///< Start of the clip within its trial, see clip_start().
};

/// Draws from `seed` alone (train::epoch_seed of the run's seed, the epoch and the trial). So the result is the same on
/// any number of ranks and in a resumed run.
Augmentation draw_augmentation(std::uint64_t seed);

/// Converts decoded clips to the model's input, on the device, in one pass over the bytes.
/// `pixels` [batch, frames, height, width] uint8; `augmentations` one per clip, or empty for none.
/// Returns float32 [batch, 2, frames, height, width]: brightness from -1 to 1, and 4 times its change since the
/// previous frame (0 in the first frame). The factor gives both channels a similar range.
at::Tensor prepare_clips(const at::Tensor& pixels, const std::vector<Augmentation>& augmentations);

}  // namespace video
