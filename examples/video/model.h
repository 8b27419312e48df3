// Tier 2: torch/nn/module.h.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>

namespace video {

struct ModelOptions {
  std::int64_t classes = 0;
  double dropout = 0.2;
  /// Channels after the first convolution; each of the four others has about twice as many as the one before. 16 gives
  /// 3.06 M parameters.
  std::int64_t width = 16;
};

/// A 3D-CNN: five convolutions, each with batch normalisation and ReLU, then the mean over time and space. Clips may
/// have any length and size from 1 frame of 16x16. Space is halved from the first convolution, time from the second,
/// which keeps the expensive first layers small.
class Classifier : public torch::nn::Module {
 public:
  /// Draws the weights from torch's default generator: seed the generator first.
  explicit Classifier(const ModelOptions& options);

  /// `clips` [batch, 2, frames, height, width] from prepare_clips(); returns logits [batch, classes].
  at::Tensor forward(const at::Tensor& clips);

 private:
  torch::nn::Sequential layers_{nullptr};
  torch::nn::Dropout dropout_{nullptr};
  torch::nn::Linear head_{nullptr};
};

}  // namespace video
