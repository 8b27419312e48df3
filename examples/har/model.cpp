#include "har/model.h"

#include <torch/torch.h>

namespace har {
namespace {

namespace nn = torch::nn;

void add_block(nn::Sequential& layers, std::int64_t in, std::int64_t out, std::int64_t kernel) {
  layers->push_back(nn::Conv1d(nn::Conv1dOptions(in, out, kernel).padding(kernel / 2).bias(false)));
  layers->push_back(nn::BatchNorm1d(out));
  layers->push_back(nn::ReLU());
}

// ceil_mode supports windows of a single step.
nn::MaxPool1d halve() { return nn::MaxPool1d(nn::MaxPool1dOptions(2).ceil_mode(true)); }

nn::Sequential convolutions(std::int64_t channels) {
  nn::Sequential layers;
  add_block(layers, channels, 64, 7);
  layers->push_back(halve());
  add_block(layers, 64, 128, 5);
  layers->push_back(halve());
  add_block(layers, 128, 128, 3);
  return layers;
}

nn::Sequential perceptron(std::int64_t inputs, double dropout) {
  return nn::Sequential(nn::Flatten(), nn::Linear(inputs, 256), nn::ReLU(), nn::Dropout(dropout), nn::Linear(256, 128),
                        nn::ReLU());
}

}  // namespace

Classifier::Classifier(const ModelOptions& options) : options_(options) { reset(); }

void Classifier::reset() {
  constexpr std::int64_t kHidden = 64;
  if (options_.mode == Mode::kLstm) {
    lstm_ = register_module(
        "lstm", nn::LSTM(nn::LSTMOptions(options_.channels, kHidden).batch_first(true).bidirectional(true)));
  } else {
    layers_ = register_module("layers", options_.mode == Mode::kCnn
                                            ? convolutions(options_.channels)
                                            : perceptron(options_.channels * options_.steps, options_.dropout));
  }
  dropout_ = register_module("dropout", nn::Dropout(options_.dropout));
  head_ = register_module("head", nn::Linear(options_.mode == Mode::kLstm ? 2 * kHidden : 128, options_.classes));
}

at::Tensor Classifier::forward(const at::Tensor& windows) {
  at::Tensor features;
  switch (options_.mode) {
    case Mode::kCnn:
      features = layers_->forward(windows).mean(2);
      break;
    case Mode::kLstm:
      features = std::get<0>(lstm_(windows.transpose(1, 2).contiguous())).mean(1);
      break;
    case Mode::kFlatten:
      features = layers_->forward(windows);
      break;
  }
  return head_(dropout_(features));
}

std::shared_ptr<Classifier> make_model(const ModelOptions& options) { return std::make_shared<Classifier>(options); }

}  // namespace har
