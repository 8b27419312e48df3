// Tier 2: torch/nn/module.h, through options.h.
#pragma once

#include <memory>
#include <string>

#include <ddpkit/comm/process_group.h>

#include "asr/options.h"

namespace asr {

/// Opens the utterances of a manifest or folder that `options` select, in the model's frames. Collective; see Dataset.
std::unique_ptr<Dataset> open_dataset(const std::string& path, const Options& options, const Recognizer& model,
                                      Faults& faults, const ddpkit::ProcessGroup& group);

/// The model of a checkpoint in eval mode, and the options of its training.
struct TrainedModel {
  std::shared_ptr<Recognizer> model;
  Options options;
};
/// `save_dir`: folder of a run; empty: the last run. Throws InvalidArgument if it holds no run of this program.
TrainedModel load_model(const std::string& save_dir);

/// Computes the error rates of the model in run.save_dir on its dev and test sets, or on the sets that `given` names.
/// Rank 0 prints them, or one line of JSON per set. Collective.
void evaluate_run(const Options& given, const ddpkit::ProcessGroup& group);

}  // namespace asr
