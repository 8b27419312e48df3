// Tier 0: the standard library only. Torch's modules and optimizers are declared, not included.
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

/// Where a run stands, kept beside its weights and its optimizer's state.
struct CheckpointInfo {
  std::int64_t epoch = 0;     ///< Epochs finished.
  std::int64_t step = 0;      ///< Optimizer steps taken.
  std::string config = "{}";  ///< What makes this run this run, as JSON.
  int ranks = 1;              ///< That wrote the checkpoint; what is given to write one with does not matter.
};

/// Something else that a run needs to go on as if it had never stopped: a schedule, a gradient scaler, a sampler.
struct CheckpointPart {
  std::string name;                                            ///< Under which it is kept and found again.
  std::function<void(torch::serialize::OutputArchive&)> save;  ///< Called in save(), on the ranks that write it.
  std::function<void(torch::serialize::InputArchive&)> load;   ///< Called in load(); throws for what does not fit.
  /// Each rank has its own (a hook's errors, sums over its samples); false: rank 0's is for all. Left as it is where
  /// the run goes on on another number of ranks.
  bool of_each_rank = false;
};

/// Of anything with save(OutputArchive&) and load(InputArchive&), which must outlive it.
template <class T>
CheckpointPart checkpoint_part(std::string name, T& object, bool of_each_rank = false) {
  return {.name = std::move(name),
          .save = [&object](torch::serialize::OutputArchive& archive) { object.save(archive); },
          .load = [&object](torch::serialize::InputArchive& archive) { object.load(archive); },
          .of_each_rank = of_each_rank};
}

/// Writes the bare module's parameters and buffers, the optimizer's state, the random generators' states, `parts` and
/// `info` to `path`, whole or not at all, as a torch::serialize archive with a checksum in its zip comment. Throws
/// Error with the system's reason (no space, no permission).
void write_checkpoint(const std::filesystem::path& path, const torch::nn::Module& module,
                      const torch::optim::Optimizer& optimizer, const CheckpointInfo& info,
                      const std::vector<CheckpointPart>& parts = {});

/// The same in a job, with the random generators' states of all ranks, and their modules' buffers where they differ.
/// Collective: rank 0 writes, and all ranks return after the file has been written, or throw its Error. Throws
/// ModelMismatch for parameters that differ between ranks.
void save_checkpoint(const std::filesystem::path& path, const torch::nn::Module& module,
                     const torch::optim::Optimizer& optimizer, const CheckpointInfo& info, const ProcessGroup& group,
                     const std::vector<CheckpointPart>& parts = {});

/// Gives the module and the optimizer what write_checkpoint() wrote, in place; parameters keep their storage and
/// device; `parts` are loaded by their names. What is each rank's own, random generators among it, is put back where
/// as many ranks wrote the checkpoint. Throws InvalidArgument, with module and optimizer as they were, when the file is
/// missing, is no checkpoint, a truncated one or one whose checksum does not fit, or belongs to another model (the
/// message names the first parameter that differs) or another kind of optimizer, or lacks a part.
CheckpointInfo read_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                               torch::optim::Optimizer& optimizer, const std::vector<CheckpointPart>& parts = {});

/// The same in a job. Collective: rank 0 reads the file and sends it to the others, so only its host needs it.
CheckpointInfo load_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                               torch::optim::Optimizer& optimizer, const ProcessGroup& group,
                               const std::vector<CheckpointPart>& parts = {});

/// Only where the run stood. Throws InvalidArgument when the file is missing, truncated or no checkpoint.
CheckpointInfo read_checkpoint_info(const std::filesystem::path& path);

/// Options of Checkpoint.
struct CheckpointOptions {
  /// So many of the last checkpoints stay. From 2 on, PATH's siblings STEM-STEP.pt are the last ones, PATH the newest
  /// of them (a hard link), and a damaged PATH is replaced by the newest good one.
  int keep = 1;
  /// Write behind the training's back: save() returns once rank 0 holds a copy of the state in memory.
  bool asynchronous = true;
  /// Throw ModelMismatch on all ranks, before anything is written, if parameters differ between ranks. Rank 0's are
  /// written: set false only if ranks keep different values on purpose, as of `parameters_to_ignore`.
  bool check_parameters = true;
  std::string best_name = "best.pt";  ///< Of the best one, beside PATH.
};

/// The checkpoints of a run: the last ones and the best, written while the training goes on. Whenever the process is
/// killed, PATH is a whole checkpoint: the one saved last or the one before.
///
///     Checkpoint checkpoint("runs/1/checkpoint.pt", group, {.keep = 3});
///     ...
///     checkpoint.save(*model, optimizer, {.epoch = epoch, .step = step}, parts);
///     ...
///     checkpoint.wait();
class Checkpoint {
 public:
  /// Throws InvalidArgument when none is to be kept.
  Checkpoint(std::filesystem::path path, const ProcessGroup& group, CheckpointOptions options = {});
  /// Waits for the file; what went wrong with it since the last save() or wait() is said on stderr.
  ~Checkpoint();
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  /// What save_checkpoint() does, and the best name too with `is_best`. Collective. Throws, on all ranks, what the
  /// writing before it failed with: the checkpoint before that stands.
  void save(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer, const CheckpointInfo& info,
            const std::vector<CheckpointPart>& parts = {}, bool is_best = false);
  /// Returns when the last one saved is on the disk. Collective. Throws what writing it failed with, on all ranks.
  void wait();
  /// What load_checkpoint() does; of a damaged file after recover_checkpoint().
  CheckpointInfo load(torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                      const std::vector<CheckpointPart>& parts = {});

 private:
  struct Writer;

  std::filesystem::path path_;
  std::unique_ptr<ProcessGroup> group_;
  CheckpointOptions options_;
  std::unique_ptr<Writer> writer_;  ///< Of rank 0.
};

/// Where `path` is there and damaged, and an older checkpoint beside it is whole, puts that one in its place, keeps the
/// damaged file as PATH.damaged, and says so on stderr. Returns whether it did. For one process: rank 0.
bool recover_checkpoint(const std::filesystem::path& path);

}  // namespace ddpkit::train
