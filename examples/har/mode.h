// Tier 0.
#pragma once

namespace har {

enum class Mode {
  kCnn,      ///< Convolutions over time with batch normalisation, then the mean over time.
  kLstm,     ///< A bidirectional LSTM over the steps, then the mean of its outputs.
  kFlatten,  ///< A multi-layer perceptron on the flattened window.
};

}  // namespace har
