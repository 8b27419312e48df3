// Tier 1: ATen/core/Tensor.h, through dataset.h.
#pragma once

#include <string>
#include <vector>

#include <ddpkit/comm/process_group.h>

#include "asr/dataset.h"
#include "asr/options.h"
#include "asr/score.h"

namespace asr {

/// The negative log-likelihood of each utterance's target, over its length: Graves and others 2006, with torch's
/// ctc_loss. `logits` [batch, steps, labels], `steps` [batch] int64; returns [batch], infinite where no path fits.
at::Tensor ctc_losses(const at::Tensor& logits, const at::Tensor& steps, const Batch& batch);

/// The steps that the model makes of each utterance's frames. [batch] int64
at::Tensor steps_of(const Recognizer& model, const Batch& batch);

/// A transcript beside the truth.
struct Sample {
  std::string name, truth, heard;
};

struct EvaluationResult {
  double loss = 0;  ///< Mean over utterances; NaN without any.
  ErrorCounts errors;
  std::vector<Sample> samples;  ///< Of this rank's first utterances.
};

/// Transcribes every utterance of a set once, each on one rank, and sums up over all ranks; the same sums on each.
/// Collective.
EvaluationResult evaluate(Recognizer& model, const Dataset& dataset, const EvaluationOptions& options,
                          const ddpkit::ProcessGroup& group);

/// The likeliest text of one utterance. `log_probs` [steps, labels].
std::string transcript(const at::Tensor& log_probs, const EvaluationOptions& options);

}  // namespace asr
