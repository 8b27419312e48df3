// Tier 2: torch/nn/module.h.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>

#include <cstdint>
#include <memory>

#include "har/mode.h"

namespace har {

struct ModelOptions {
  Mode mode = Mode::kCnn;
  std::int64_t channels = 0;
  std::int64_t steps = 0;
  std::int64_t classes = 0;
  double dropout = 0.2;
};

/// Maps windows to one logit per class. Cloneable, as DataParallel requires.
class Classifier : public torch::nn::Cloneable<Classifier> {
 public:
  /// Draws the weights from torch's default generator: seed the generator first.
  explicit Classifier(const ModelOptions& options);

  void reset() override;
  /// `windows` [batch, channels, steps]; returns [batch, classes].
  at::Tensor forward(const at::Tensor& windows);

 private:
  ModelOptions options_;
  torch::nn::Sequential layers_{nullptr};  ///< kCnn, kFlatten.
  torch::nn::LSTM lstm_{nullptr};          ///< kLstm.
  torch::nn::Dropout dropout_{nullptr};
  torch::nn::Linear head_{nullptr};
};

std::shared_ptr<Classifier> make_model(const ModelOptions& options);

}  // namespace har
