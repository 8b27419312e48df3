// Tier 2: torch/nn/module.h, through options.h.
#pragma once

#include <memory>
#include <string>

#include <ddpkit/comm/process_group.h>

#include "asr/options.h"

namespace asr {

/// The utterances of a manifest or folder that `options` want, in the model's frames. Collective; see Dataset.
std::unique_ptr<Dataset> open_dataset(const std::string& path, const Options& options, const Recognizer& model,
                                      Faults& faults, const ddpkit::ProcessGroup& group);

/// The number of a module's parameters.
std::int64_t parameter_count(const torch::nn::Module& module);

/// A run's model in eval mode, as its checkpoint has it, and the options it was trained with.
struct TrainedModel {
  std::shared_ptr<Recognizer> model;
  Options options;
};
/// Throws InvalidArgument where `save_dir` holds no run of this program.
TrainedModel load_model(const std::string& save_dir);

/// Error rates of the model in run.save_dir on its dev and test sets, or on those that `given` names instead. Rank 0
/// prints them, or a line of JSON a set. Collective.
void evaluate_run(const Options& given, const ddpkit::ProcessGroup& group);

}  // namespace asr
