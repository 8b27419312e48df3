#include "video/model.h"

#include <torch/torch.h>

#include "video/augment.h"

namespace video {
namespace {

namespace nn = torch::nn;

void add_block(nn::Sequential& layers, std::int64_t in, std::int64_t out, torch::ExpandingArray<3> kernel,
               torch::ExpandingArray<3> stride) {
  const torch::ExpandingArray<3> padding{{(*kernel)[0] / 2, (*kernel)[1] / 2, (*kernel)[2] / 2}};
  layers->push_back(nn::Conv3d(nn::Conv3dOptions(in, out, kernel).stride(stride).padding(padding).bias(false)));
  layers->push_back(nn::BatchNorm3d(out));
  layers->push_back(nn::ReLU());
}

}  // namespace

Classifier::Classifier(const ModelOptions& options) {
  const std::int64_t width = options.width;
  nn::Sequential layers;
  add_block(layers, kClipChannels, width, {{3, 5, 5}}, {{1, 2, 2}});
  add_block(layers, width, 3 * width, 3, 2);
  add_block(layers, 3 * width, 6 * width, 3, 2);
  add_block(layers, 6 * width, 14 * width, 3, 2);
  add_block(layers, 14 * width, 24 * width, 3, {{1, 2, 2}});
  layers_ = register_module("layers", layers);
  dropout_ = register_module("dropout", nn::Dropout(options.dropout));
  head_ = register_module("head", nn::Linear(24 * width, options.classes));
}

at::Tensor Classifier::forward(const at::Tensor& clips) {
  const at::Tensor features = layers_->forward(clips).mean({2, 3, 4});
  return head_(dropout_(features));
}

}  // namespace video
