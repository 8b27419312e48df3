// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "video/augment.h"
#include "video/clip_loader.h"
#include "video/trials.h"

namespace video {

/// A batch of decoded clips in main memory.
struct Clips {
  at::Tensor pixels;                        ///< [batch, frames, height, width] uint8
  at::Tensor labels;                        ///< [batch] int64
  std::vector<Augmentation> augmentations;  ///< [batch], or empty.

  std::int64_t size() const { return labels.size(0); }
};

/// The random variation of an epoch's clips.
struct Variation {
  std::uint64_t seed = 0;
  std::int64_t epoch = 0;
  bool augment = true;  ///< If false, only the start of the clip within its trial is drawn.
};

/// Loads the clips of these trials. With `variation`, each clip is varied by seed, epoch and trial. Without it, each is
/// the middle of its trial. `repeat_frame`: each clip repeats its middle frame. Thread-safe.
Clips load_clips(const TrialSet& set, const std::vector<std::size_t>& trials, ClipLoader& loader,
                 const std::optional<Variation>& variation, bool repeat_frame);

}  // namespace video
