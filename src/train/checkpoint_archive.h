// Writes and reads the content of checkpoint files.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ddpkit/train/checkpoint.h>

#include "train/sealed_file.h"

namespace ddpkit::train {

/// Writes the parts that all ranks share, each as "part_NAME".
void write_parts(torch::serialize::OutputArchive& archive, const std::vector<CheckpointPart>& parts);

/// Writes an archive without its seal. `rank_states`: see gather_rank_states(). Passes exceptions of `sink` to the
/// caller.
void write_archive(const Sink& sink, const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                   const CheckpointInfo& info, const std::vector<CheckpointPart>& parts,
                   const std::vector<std::string>& rank_states);

/// Writes the archive of a sharded checkpoint: the same without parameters and optimizer state, and the names of the
/// shards' files.
void write_index(const Sink& sink, const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                 const CheckpointInfo& info, const std::vector<CheckpointPart>& parts,
                 const std::vector<std::string>& rank_states, const std::vector<std::string>& shards);

/// Reads the `bytes` of the file `path` as rank `rank` of `world_size`, and the files of its shards: see
/// read_checkpoint(). The result puts everything into place, while the arguments exist.
std::function<CheckpointInfo()> read_archive(const std::string& path, const std::string& bytes,
                                             torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                                             const std::vector<CheckpointPart>& parts, int rank, int world_size);

/// See read_checkpoint_info().
CheckpointInfo info_of_archive(const std::string& path, const std::string& bytes);
/// Returns the names of the shards' files; empty if the checkpoint is not sharded.
std::vector<std::string> shards_of_archive(const std::string& path, const std::string& bytes);

}  // namespace ddpkit::train
