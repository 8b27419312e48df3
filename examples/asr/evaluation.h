// Tier 1: ATen/core/Tensor.h, through dataset.h.
#pragma once

#include <string>
#include <vector>

#include <ddpkit/comm/process_group.h>

#include "asr/dataset.h"
#include "asr/options.h"
#include "asr/score.h"

namespace asr {

/// Returns the negative log-likelihood of each utterance's target, divided by its length: Graves and others 2006, with
/// torch's ctc_loss. `logits` [batch, steps, labels], `steps` [batch] int64. Returns [batch]; infinite if no path fits.
at::Tensor ctc_losses(const at::Tensor& logits, const at::Tensor& steps, const Batch& batch);

/// Returns the model's output steps for each utterance. [batch] int64
at::Tensor steps_of(const Recognizer& model, const Batch& batch);

/// A transcript and its reference.
struct Sample {
  std::string name, reference, hypothesis;
};

struct EvaluationResult {
  double loss = 0;  ///< Mean over utterances; NaN if there are none.
  ErrorCounts errors;
  std::vector<Sample> samples;  ///< The first utterances of this rank.
};

/// Transcribes each utterance of a set once, each on one rank. Returns the sums over all ranks, equal on each rank.
/// Collective.
EvaluationResult evaluate(Recognizer& model, const Dataset& dataset, const EvaluationOptions& options,
                          const ddpkit::ProcessGroup& group);

/// Returns the most likely text of one utterance. `log_probs` [steps, labels].
std::string transcript(const at::Tensor& log_probs, const EvaluationOptions& options);

}  // namespace asr
