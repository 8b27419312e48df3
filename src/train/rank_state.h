// What differs from rank to rank in a run.
#pragma once

#include <string>
#include <vector>

#include <ddpkit/train/checkpoint.h>

namespace ddpkit::train {

/// The states of the random generators, of CPU and GPU, the module's buffers when `with_buffers`, and the parts that
/// are each rank's own: an archive.
std::string rank_state(const torch::nn::Module& module, const std::vector<CheckpointPart>& parts, bool with_buffers);

/// Of all ranks; with buffers only where they differ between ranks. Collective. Throws ModelMismatch on all ranks for
/// parameters that differ between ranks, with `check_parameters`. [rank]
std::vector<std::string> gather_rank_states(const torch::nn::Module& module, const std::vector<CheckpointPart>& parts,
                                            const ProcessGroup& group, bool check_parameters);

/// A rank's state that has been read and can be put into place.
class RankState {
 public:
  /// Throws InvalidArgument, naming the checkpoint `path`, when it lacks a part.
  RankState(const std::string& path, const std::string& bytes, torch::nn::Module& module,
            const std::vector<CheckpointPart>& parts);
  void put_into_place();

 private:
  std::vector<std::function<void()>> steps_;
};

}  // namespace ddpkit::train
