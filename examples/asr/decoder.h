// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace asr {

/// Takes the most likely label of each frame, drops repetitions, then blanks. Works incrementally.
class GreedyDecoder {
 public:
  /// Takes `log_probs` or logits [frames, labels]. Returns the new labels.
  std::vector<std::int64_t> add(const at::Tensor& log_probs);

 private:
  std::int64_t last_ = 0;  ///< The last frame's label.
};

/// Returns all labels of an utterance.
std::vector<std::int64_t> greedy_decode(const at::Tensor& log_probs);

struct Hypothesis {
  std::vector<std::int64_t> labels;
  double log_probability = 0;  ///< Of all paths in the beam that give these labels.
};

/// Prefix beam search: sums the probabilities of all paths that lead to the same labels; greedy_decode() takes the best
/// path. Hannun and others 2014 (arXiv 1408.2873, algorithm 1), in the log domain and without a language model.
/// `log_probs` [frames, labels] float32, normalised. Returns at most `beam` hypotheses, the most likely first. Skips
/// labels that are less likely than exp(`least`) in a frame. Throws InvalidArgument for a beam below 1.
std::vector<Hypothesis> prefix_beam_search(const at::Tensor& log_probs, std::int64_t beam, double least = -14);

}  // namespace asr
