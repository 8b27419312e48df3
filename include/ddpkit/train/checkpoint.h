// Tier 0: the standard library only. Torch's modules and optimizers are declared, not included.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace ddpkit {
class ProcessGroup;
}

namespace ddpkit::train {

/// Where a run stands, kept beside its weights and its optimizer's state.
struct CheckpointInfo {
  std::int64_t epoch = 0;     ///< Epochs finished.
  std::int64_t step = 0;      ///< Optimizer steps taken.
  std::string config = "{}";  ///< What makes this run this run, as JSON.
};

/// Writes the bare module's parameters and buffers, the optimizer's state and `info` to `path`, whole or not at all, as
/// a torch::serialize archive. Throws Error with the system's reason (no space, no permission).
void write_checkpoint(const std::filesystem::path& path, const torch::nn::Module& module,
                      const torch::optim::Optimizer& optimizer, const CheckpointInfo& info);

/// The same in a job. Collective: rank 0 writes, and all ranks return once the file is there or throw the same Error.
void save_checkpoint(const std::filesystem::path& path, const torch::nn::Module& module,
                     const torch::optim::Optimizer& optimizer, const CheckpointInfo& info, const ProcessGroup& group);

/// Gives the module and the optimizer what write_checkpoint() wrote, in place; parameters keep their storage and
/// device. Throws InvalidArgument, with module and optimizer as they were, when the file is missing, is no checkpoint
/// or a truncated one, or belongs to another model (the message names the first parameter that differs) or another kind
/// of optimizer.
CheckpointInfo read_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                               torch::optim::Optimizer& optimizer);

/// The same in a job. Collective: rank 0 reads the file and sends it to the others, so only its host needs it.
CheckpointInfo load_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                               torch::optim::Optimizer& optimizer, const ProcessGroup& group);

/// Only where the run stood. Throws InvalidArgument when the file is missing, truncated or no checkpoint.
CheckpointInfo read_checkpoint_info(const std::filesystem::path& path);

}  // namespace ddpkit::train
