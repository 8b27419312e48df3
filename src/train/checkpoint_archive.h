// Writes and reads the content of checkpoint files.
#pragma once

#include <string>
#include <vector>

#include <ddpkit/train/checkpoint.h>

#include "train/sealed_file.h"

namespace ddpkit::train {

/// Writes an archive without its seal. `rank_states`: see gather_rank_states(). Passes exceptions of `sink` to the
/// caller.
void write_archive(const Sink& sink, const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                   const CheckpointInfo& info, const std::vector<CheckpointPart>& parts,
                   const std::vector<std::string>& rank_states);

/// Reads the `bytes` of the file `path` as rank `rank` of `world_size`: see read_checkpoint().
CheckpointInfo restore_archive(const std::string& path, const std::string& bytes, torch::nn::Module& module,
                               torch::optim::Optimizer& optimizer, const std::vector<CheckpointPart>& parts, int rank,
                               int world_size);

/// See read_checkpoint_info().
CheckpointInfo info_of_archive(const std::string& path, const std::string& bytes);

}  // namespace ddpkit::train
