#include "asr/model.h"

#include <torch/torch.h>

#include <ddpkit/parallel/sync_batch_norm.h>

#include "asr/lmu.h"

namespace asr {

Recognizer::Recognizer(const ModelOptions& options) : options_(options) { reset(); }

void Recognizer::reset() {
  convolutions_ = register_module("convolutions", torch::nn::ModuleList());
  batch_norms_ = register_module("batch_norms", torch::nn::ModuleList());
  layer_norms_ = register_module("layer_norms", torch::nn::ModuleList());
  layers_ = register_module("layers", torch::nn::ModuleList());
  std::int64_t channels = options_.mels;
  for (const std::int64_t stride : options_.strides) {
    convolutions_->push_back(
        torch::nn::Conv1d(torch::nn::Conv1dOptions(channels, options_.width, options_.kernel).stride(stride)));
    if (options_.batch_norm)
      batch_norms_->push_back(ddpkit::SyncBatchNorm(torch::nn::BatchNormOptions(options_.width)));
    channels = options_.width;
  }
  for (std::int64_t i = 0; i < options_.layers; ++i) {
    layer_norms_->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({options_.width})));
    layers_->push_back(LmuLayer(LmuOptions{.width = options_.width,
                                           .memory_channels = options_.memory_channels,
                                           .order = options_.order,
                                           .theta = options_.theta}));
  }
  last_norm_ = register_module("last_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options_.width})));
  head_ = register_module("head", torch::nn::Linear(options_.width, options_.labels));
  feature_mean = register_buffer("feature_mean", torch::zeros({options_.mels}));
  feature_deviation = register_buffer("feature_deviation", torch::ones({options_.mels}));
}

std::int64_t Recognizer::output_frames(std::int64_t frames) const {
  for (const std::int64_t stride : options_.strides) frames = (frames + stride - 1) / stride;
  return frames;
}

// `input` [batch, channels, frames], which begins with kernel - 1 frames of the past.
at::Tensor Recognizer::convolve(std::size_t index, const at::Tensor& input) {
  at::Tensor x = convolutions_[index]->as<torch::nn::Conv1d>()->forward(input);
  if (options_.batch_norm) x = batch_norms_[index]->as<ddpkit::SyncBatchNorm>()->forward(x);
  return torch::gelu(x);
}

at::Tensor Recognizer::forward(const at::Tensor& features, const at::Tensor& noise) {
  at::Tensor x = features.transpose(1, 2);
  for (std::size_t i = 0; i < options_.strides.size(); ++i)
    x = convolve(i, torch::constant_pad_nd(x, {options_.kernel - 1, 0}));
  x = x.transpose(1, 2).contiguous();
  const bool drops = is_training() && options_.dropout > 0 && noise.defined();
  const at::Tensor kept = drops ? (noise >= options_.dropout).to(x.dtype()) / (1 - options_.dropout) : at::Tensor();
  for (std::size_t i = 0; i < layers_->size(); ++i) {
    const at::Tensor normed = layer_norms_[i]->as<torch::nn::LayerNorm>()->forward(x);
    const at::Tensor y = layers_[i]->as<LmuLayer>()->forward(normed);
    x = drops ? torch::addcmul(x, y, kept.select(1, static_cast<std::int64_t>(i)).unsqueeze(1)) : x + y;
  }
  return head_(last_norm_(x)).to(torch::kFloat);
}

at::Tensor Recognizer::stream(const at::Tensor& features, StreamState& state) {
  const torch::NoGradGuard no_grad;
  at::Tensor x = features.t().unsqueeze(0);
  if (state.inputs.empty()) {
    for (std::size_t i = 0; i < options_.strides.size(); ++i)
      state.inputs.push_back(torch::zeros({1, i == 0 ? options_.mels : options_.width, options_.kernel - 1}));
    state.memories.resize(layers_->size());
  }
  for (std::size_t i = 0; i < options_.strides.size(); ++i) {
    const at::Tensor all = torch::cat({state.inputs[i], x}, 2);
    const std::int64_t ready =
        all.size(2) < options_.kernel ? 0 : (all.size(2) - options_.kernel) / options_.strides[i] + 1;
    state.inputs[i] = all.slice(2, ready * options_.strides[i]).clone();
    if (ready == 0) return torch::zeros({0, options_.labels});
    x = convolve(i, all);
  }
  std::vector<at::Tensor> logits;
  for (std::int64_t t = 0; t < x.size(2); ++t) {
    at::Tensor frame = x.select(2, t);
    for (std::size_t i = 0; i < layers_->size(); ++i) {
      const at::Tensor normed = layer_norms_[i]->as<torch::nn::LayerNorm>()->forward(frame);
      frame = frame + layers_[i]->as<LmuLayer>()->step(normed, state.memories[i]);
    }
    logits.push_back(head_(last_norm_(frame)));
  }
  return torch::cat(logits);
}

}  // namespace asr
