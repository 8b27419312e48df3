// State that differs between the ranks of a run.
#pragma once

#include <string>
#include <vector>

#include <ddpkit/train/checkpoint.h>

namespace ddpkit::train {

/// Returns an archive with the states of the CPU and GPU random generators, the module's buffers if `with_buffers`, and
/// the per-rank parts.
std::string rank_state(const torch::nn::Module& module, const std::vector<CheckpointPart>& parts, bool with_buffers);

/// Returns the states of all ranks, with buffers only if they differ between ranks. Collective. With
/// `check_parameters`, throws ModelMismatch on all ranks if parameters differ between ranks. [rank]
std::vector<std::string> gather_rank_states(const torch::nn::Module& module, const std::vector<CheckpointPart>& parts,
                                            const ProcessGroup& group, bool check_parameters);

/// The state of a rank, read and ready to be restored.
class RankState {
 public:
  /// Throws InvalidArgument with the name of the checkpoint `path` if a part is missing.
  RankState(const std::string& path, const std::string& bytes, torch::nn::Module& module,
            const std::vector<CheckpointPart>& parts);
  void put_into_place();

 private:
  std::vector<std::function<void()>> steps_;
};

}  // namespace ddpkit::train
