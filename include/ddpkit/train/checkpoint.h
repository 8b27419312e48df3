// Tier 0: the standard library only. Torch's modules and optimizers are only declared.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
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

/// Progress and configuration of a run, saved with the weights and the optimizer's state.
struct CheckpointInfo {
  std::int64_t epoch = 0;     ///< Epochs finished.
  std::int64_t step = 0;      ///< Optimizer steps taken.
  std::string config = "{}";  ///< Configuration of the run, as JSON.
  int ranks = 1;              ///< Number of ranks that wrote the checkpoint. Ignored when writing.
};

/// Other state that a run needs to resume: a schedule, a gradient scaler, a sampler.
struct CheckpointPart {
  std::string name;                                            ///< Key in the checkpoint.
  std::function<void(torch::serialize::OutputArchive&)> save;  ///< Called in save(), on the ranks that write the part.
  std::function<void(torch::serialize::InputArchive&)> load;   ///< Called in load(); throws if the part does not fit.
  /// True: each rank has separate state (a hook's errors, sums over its samples). It is not loaded if the run resumes
  /// on another number of ranks. False: rank 0's state is for all ranks.
  bool of_each_rank = false;
};

/// Returns a part for an object with save(OutputArchive&) and load(InputArchive&). The object must outlive the part.
template <class T>
CheckpointPart checkpoint_part(std::string name, T& object, bool of_each_rank = false) {
  return {.name = std::move(name),
          .save = [&object](torch::serialize::OutputArchive& archive) { object.save(archive); },
          .load = [&object](torch::serialize::InputArchive& archive) { object.load(archive); },
          .of_each_rank = of_each_rank};
}

/// Writes the module's parameters and buffers, the optimizer's state, the states of the random generators, `parts` and
/// `info` to `path`, atomically. The file is a torch::serialize archive with a checksum in its zip comment. Pass the
/// module without a wrapper. For one process. Throws Error with the system's reason (no space, no permission).
void write_checkpoint(const std::filesystem::path& path, const torch::nn::Module& module,
                      const torch::optim::Optimizer& optimizer, const CheckpointInfo& info,
                      const std::vector<CheckpointPart>& parts = {});

/// Writes a checkpoint of all ranks, with the random generators' states of all ranks, and the buffers that differ
/// between ranks. Collective: rank 0 writes, and all ranks return after the file has been written, or throw its Error.
/// Throws ModelMismatch if parameters differ between ranks.
void save_checkpoint(const std::filesystem::path& path, const torch::nn::Module& module,
                     const torch::optim::Optimizer& optimizer, const CheckpointInfo& info, const ProcessGroup& group,
                     const std::vector<CheckpointPart>& parts = {});

/// Loads a checkpoint into the module and the optimizer, in place. Parameters keep their storage and device. `parts`
/// are loaded by name. State that each rank has separately, such as random generators, is restored if the number of
/// ranks is the same. For one process. Throws InvalidArgument, and changes neither module nor optimizer, if the file
/// - is missing, truncated, not a checkpoint, or has a wrong checksum,
/// - belongs to another model (the error names the first parameter that differs) or another kind of optimizer,
/// - lacks a part.
CheckpointInfo read_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                               torch::optim::Optimizer& optimizer, const std::vector<CheckpointPart>& parts = {});

/// Loads a checkpoint on all ranks. Collective: rank 0 reads the file and sends it, so only its host needs the file. Of
/// a sharded checkpoint, each rank reads the files of the shards that it needs. It can be loaded on any number of
/// ranks, also without FullyShardedDataParallel.
CheckpointInfo load_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                               torch::optim::Optimizer& optimizer, const ProcessGroup& group,
                               const std::vector<CheckpointPart>& parts = {});

/// Reads only the CheckpointInfo. Throws InvalidArgument if the file is missing, truncated or not a checkpoint.
CheckpointInfo read_checkpoint_info(const std::filesystem::path& path);

/// Options of Checkpoint.
struct CheckpointOptions {
  /// Number of checkpoints to keep. From 2 on, the files STEM-STEP.pt beside PATH are the last checkpoints. PATH is the
  /// newest of them (a hard link). A damaged PATH is replaced by the newest good one.
  int keep = 1;
  /// Write in the background: save() returns when rank 0 holds a copy of the state in memory.
  bool asynchronous = true;
  /// Throw ModelMismatch on all ranks, before writing, if parameters differ between ranks. The checkpoint has rank 0's
  /// values. Set it to false only if ranks have different values on purpose, for example with `parameters_to_ignore`.
  bool check_parameters = true;
  /// With a ShardedOptimizer of a FullyShardedDataParallel: each rank writes its shards to a file in the folder
  /// STEM.shards beside PATH, and PATH names these files. No rank needs the memory of the whole model, and save() and
  /// load() need no scope of whole(). All ranks need the same folder. save() waits for the files.
  bool sharded = false;
  std::string best_name = "best.pt";  ///< Name of the best checkpoint, beside PATH.
  /// If not empty, the best checkpoint also has the name STEM + N + ".pt". N is the index of its epoch, from 0.
  std::string best_epoch_stem = {};
};

/// The checkpoints of a run: the last ones and the best, written in the background. If the process is killed at any
/// time, PATH is a complete checkpoint: the last one or the one before.
///
///     Checkpoint checkpoint("runs/1/checkpoint.pt", group, {.keep = 3});
///     ...
///     checkpoint.save(*model, optimizer, {.epoch = epoch, .step = step}, parts);
///     ...
///     checkpoint.wait();
class Checkpoint {
 public:
  /// Throws InvalidArgument if options.keep is less than 1.
  Checkpoint(std::filesystem::path path, const ProcessGroup& group, CheckpointOptions options = {});
  /// Waits for the file. Prints errors since the last save() or wait() to stderr.
  ~Checkpoint();
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  /// Saves as save_checkpoint() does; with `is_best` also under the best name. Collective. Throws, on all ranks, the
  /// error of the previous write; the checkpoint before that write then still exists.
  void save(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer, const CheckpointInfo& info,
            const std::vector<CheckpointPart>& parts = {}, bool is_best = false);
  /// Returns when the last checkpoint is on the disk. Collective. Throws the error of writing it, on all ranks.
  void wait();
  /// Loads as load_checkpoint() does, after recover_checkpoint() if the file is damaged. Collective.
  CheckpointInfo load(torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                      const std::vector<CheckpointPart>& parts = {});

 private:
  struct Writer;

  std::filesystem::path path_;
  std::unique_ptr<ProcessGroup> group_;
  CheckpointOptions options_;
  std::unique_ptr<Writer> writer_;  ///< Only on rank 0.
};

/// If `path` exists but is damaged, and an older checkpoint beside it is intact: moves the damaged file to
/// PATH.damaged, replaces it by the older checkpoint, and prints a message to stderr. Returns whether it did. Call it
/// on rank 0 only.
bool recover_checkpoint(const std::filesystem::path& path);

}  // namespace ddpkit::train
