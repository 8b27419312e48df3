// Tier 0: the standard library only. Torch's modules and optimizers are declared, not included.
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
namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

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

/// Something else that a run needs to go on as if it had never stopped: a schedule, a gradient scaler, a hook's errors.
struct CheckpointPart {
  std::string name;
  std::function<void(torch::serialize::OutputArchive&)> save;
  std::function<void(torch::serialize::InputArchive&)> load;
};

/// Of anything with save(OutputArchive&) and load(InputArchive&), which must outlive it.
template <class T>
CheckpointPart checkpoint_part(std::string name, T& object) {
  return {.name = std::move(name),
          .save = [&object](torch::serialize::OutputArchive& archive) { object.save(archive); },
          .load = [&object](torch::serialize::InputArchive& archive) { object.load(archive); }};
}

/// Writes the bare module's parameters and buffers, the optimizer's state, `parts` and `info` to `path`, whole or not
/// at all, as a torch::serialize archive. Throws Error with the system's reason (no space, no permission).
void write_checkpoint(const std::filesystem::path& path, const torch::nn::Module& module,
                      const torch::optim::Optimizer& optimizer, const CheckpointInfo& info,
                      const std::vector<CheckpointPart>& parts = {});

/// The same in a job. Collective: rank 0 writes, and all ranks return once the file is there or throw the same Error.
void save_checkpoint(const std::filesystem::path& path, const torch::nn::Module& module,
                     const torch::optim::Optimizer& optimizer, const CheckpointInfo& info, const ProcessGroup& group,
                     const std::vector<CheckpointPart>& parts = {});

/// Gives the module and the optimizer what write_checkpoint() wrote, in place; parameters keep their storage and
/// device; `parts` are loaded by their names. Throws InvalidArgument, with module and optimizer as they were, when the
/// file is missing, is no checkpoint or a truncated one, or belongs to another model (the message names the first
/// parameter that differs) or another kind of optimizer, or lacks a part.
CheckpointInfo read_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                               torch::optim::Optimizer& optimizer, const std::vector<CheckpointPart>& parts = {});

/// The same in a job. Collective: rank 0 reads the file and sends it to the others, so only its host needs it.
CheckpointInfo load_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                               torch::optim::Optimizer& optimizer, const ProcessGroup& group,
                               const std::vector<CheckpointPart>& parts = {});

/// Only where the run stood. Throws InvalidArgument when the file is missing, truncated or no checkpoint.
CheckpointInfo read_checkpoint_info(const std::filesystem::path& path);

}  // namespace ddpkit::train
