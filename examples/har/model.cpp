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

// Rounding the pooled length up keeps even a window of one step.
nn::MaxPool1d halve() { return nn::MaxPool1d(nn::MaxPool1dOptions(2).ceil_mode(true)); }

class Cnn : public Classifier {
 public:
  explicit Cnn(const ModelOptions& options) {
    layers_ = register_module("layers", nn::Sequential());
    add_block(layers_, options.channels, 64, 7);
    layers_->push_back(halve());
    add_block(layers_, 64, 128, 5);
    layers_->push_back(halve());
    add_block(layers_, 128, 128, 3);
    dropout_ = register_module("dropout", nn::Dropout(options.dropout));
    head_ = register_module("head", nn::Linear(128, options.classes));
  }

  at::Tensor forward(at::Tensor windows) override { return head_(dropout_(layers_->forward(windows).mean(2))); }

 private:
  nn::Sequential layers_{nullptr};
  nn::Dropout dropout_{nullptr};
  nn::Linear head_{nullptr};
};

class Lstm : public Classifier {
 public:
  explicit Lstm(const ModelOptions& options) {
    constexpr std::int64_t kHidden = 64;
    lstm_ = register_module("lstm",
                            nn::LSTM(nn::LSTMOptions(options.channels, kHidden).batch_first(true).bidirectional(true)));
    dropout_ = register_module("dropout", nn::Dropout(options.dropout));
    head_ = register_module("head", nn::Linear(2 * kHidden, options.classes));
  }

  at::Tensor forward(at::Tensor windows) override {
    const at::Tensor outputs = std::get<0>(lstm_(windows.transpose(1, 2).contiguous()));
    return head_(dropout_(outputs.mean(1)));
  }

 private:
  nn::LSTM lstm_{nullptr};
  nn::Dropout dropout_{nullptr};
  nn::Linear head_{nullptr};
};

class Flatten : public Classifier {
 public:
  explicit Flatten(const ModelOptions& options) {
    layers_ = register_module(
        "layers", nn::Sequential(nn::Flatten(), nn::Linear(options.channels * options.steps, 256), nn::ReLU(),
                                 nn::Dropout(options.dropout), nn::Linear(256, 128), nn::ReLU(),
                                 nn::Dropout(options.dropout), nn::Linear(128, options.classes)));
  }

  at::Tensor forward(at::Tensor windows) override { return layers_->forward(windows); }

 private:
  nn::Sequential layers_{nullptr};
};

}  // namespace

std::shared_ptr<Classifier> make_model(const ModelOptions& options) {
  switch (options.mode) {
    case Mode::kLstm:
      return std::make_shared<Lstm>(options);
    case Mode::kFlatten:
      return std::make_shared<Flatten>(options);
    case Mode::kCnn:
      break;
  }
  return std::make_shared<Cnn>(options);
}

}  // namespace har
