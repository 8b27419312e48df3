// The files of a sharded checkpoint: each rank writes its shards of the parameters and of the optimizer's state.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace ddpkit {
class ParameterShards;
class ProcessGroup;
}  // namespace ddpkit

namespace ddpkit::train {

/// Returns the shards of the FullyShardedDataParallel that `optimizer` updates; null for all other optimizers.
ParameterShards* parameter_shards_of(const torch::optim::Optimizer& optimizer);

/// Writes the shards of all ranks to new files in the folder STEM.shards beside the checkpoint `path`. Returns their
/// names, relative to the folder of `path`. Collective. Throws InvalidArgument without a FullyShardedDataParallel, and
/// within its scope whole(). [rank]
std::vector<std::string> write_shards(const std::filesystem::path& path, const torch::nn::Module& module,
                                      const torch::optim::Optimizer& optimizer, std::int64_t step,
                                      const ProcessGroup& group);

/// The state of this rank, read and ready to be restored. The ranks that wrote the files may be more or fewer.
struct ShardsToRestore {
  std::function<void()> put_parameters;
  std::function<void()> put_optimizer;  ///< Throws InvalidArgument, and changes nothing, if the state does not fit.
};

/// Reads the files that overlap with the shards of rank `rank` of `world_size`; all files if the optimizer has whole
/// parameters, or within whole(). Throws InvalidArgument for a missing or damaged file, and for another model.
ShardsToRestore read_shards(const std::filesystem::path& path, const std::vector<std::string>& names,
                            torch::nn::Module& module, torch::optim::Optimizer& optimizer, int rank, int world_size);

/// Throws InvalidArgument if a file is missing or damaged.
void check_shards(const std::filesystem::path& path, const std::vector<std::string>& names);

/// Removes the files in the folder of the shards that `names` does not have.
void remove_other_shards(const std::filesystem::path& path, const std::vector<std::string>& names);

}  // namespace ddpkit::train
