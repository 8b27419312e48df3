// Tier 2: torch/nn/module.h.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>

namespace har {

/// Windows in, a logit a class out.
class Classifier : public torch::nn::Module {
 public:
  /// `windows` [batch, channels, steps]; returns [batch, classes].
  virtual at::Tensor forward(at::Tensor windows) = 0;
};

enum class Mode {
  kCnn,      ///< Convolutions over time with batch normalisation, then the mean over time.
  kLstm,     ///< A bidirectional LSTM over the steps, then the mean of its outputs.
  kFlatten,  ///< A multi-layer perceptron on the flattened window.
};

struct ModelOptions {
  Mode mode = Mode::kCnn;
  std::int64_t channels = 0;
  std::int64_t steps = 0;
  std::int64_t classes = 0;
  double dropout = 0.2;
};

/// Weights drawn from torch's default generator: seed it first.
std::shared_ptr<Classifier> make_model(const ModelOptions& options);

}  // namespace har
