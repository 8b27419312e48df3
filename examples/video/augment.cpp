#include "video/augment.h"

#include <ATen/ATen.h>

#include <cmath>

#include <ddpkit/train/random.h>

namespace video {
namespace {

// Returns the source of each output row (or column) of each clip. [clip, position]
at::Tensor sources(const std::vector<Augmentation>& augmentations, std::int64_t length, bool vertical) {
  const auto clips = static_cast<std::int64_t>(augmentations.size());
  at::Tensor shift = at::empty({clips, 1}, at::kLong), mirror = at::empty({clips, 1}, at::kBool);
  auto* shifts = shift.mutable_data_ptr<std::int64_t>();
  auto* mirrors = mirror.mutable_data_ptr<bool>();
  for (std::int64_t i = 0; i < clips; ++i) {
    const Augmentation& one = augmentations[static_cast<std::size_t>(i)];
    shifts[i] = std::llround((vertical ? one.shift_y : one.shift_x) * static_cast<double>(length));
    mirrors[i] = vertical ? one.mirror_y : one.mirror_x;
  }
  const at::Tensor moved = (at::arange(length, at::kLong) + shift).clamp(0, length - 1);
  return at::where(mirror, length - 1 - moved, moved);
}

at::Tensor column(const std::vector<Augmentation>& augmentations, double Augmentation::*member) {
  std::vector<float> values;
  for (const Augmentation& one : augmentations) values.push_back(static_cast<float>(one.*member));
  return at::tensor(values).view({-1, 1, 1, 1});
}

}  // namespace

Augmentation draw_augmentation(std::uint64_t seed) {
  ddpkit::train::Random random(seed);
  Augmentation one;
  one.mirror_x = random.below(2) == 1;
  one.mirror_y = random.below(2) == 1;
  one.shift_x = random.uniform(-0.08, 0.08);
  one.shift_y = random.uniform(-0.08, 0.08);
  one.gain = random.uniform(0.8, 1.25);
  one.offset = random.uniform(-0.1, 0.1);
  one.start = random.uniform(0, 1);
  return one;
}

at::Tensor prepare_clips(const at::Tensor& pixels, const std::vector<Augmentation>& augmentations) {
  const at::Device device = pixels.device();
  const std::int64_t batch = pixels.size(0), frames = pixels.size(1), height = pixels.size(2), width = pixels.size(3);
  at::Tensor bytes = pixels;
  if (!augmentations.empty()) {
    // One gather on bytes does both mirror and shift.
    const at::Tensor rows = sources(augmentations, height, true).to(device).view({batch, height, 1});
    const at::Tensor columns = sources(augmentations, width, false).to(device).view({batch, 1, width});
    const at::Tensor from = (rows * width + columns).view({batch, 1, height * width}).expand({batch, frames, -1});
    bytes = pixels.view({batch, frames, height * width}).gather(2, from).view_as(pixels);
  }
  const at::Tensor clips = at::empty({batch, kClipChannels, frames, height, width}, pixels.options().dtype(at::kFloat));
  at::Tensor grey = bytes.to(at::kFloat).mul_(2 / 255.0).sub_(1);
  if (!augmentations.empty())
    grey.mul_(column(augmentations, &Augmentation::gain).to(device))
        .add_(column(augmentations, &Augmentation::offset).to(device), 2);
  clips.select(1, 0).copy_(grey);
  const at::Tensor change = clips.select(1, 1);
  change.select(1, 0).zero_();
  if (frames > 1) {
    const at::Tensor since = change.narrow(1, 1, frames - 1);
    since.copy_(grey.narrow(1, 1, frames - 1) - grey.narrow(1, 0, frames - 1)).mul_(4);
  }
  return clips;
}

}  // namespace video
