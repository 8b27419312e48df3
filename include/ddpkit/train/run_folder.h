// Tier 0: the standard library only.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddpkit/train/checkpoint.h>

namespace ddpkit {
class ProcessGroup;
}

namespace ddpkit::train {

/// Options of open_run_folder().
struct RunFolderOptions {
  bool resume = false;  ///< Throw if there is no run to resume.
  /// Replace an existing run. If a launcher restarts a failed job (TORCHELASTIC_RESTART_COUNT), a checkpoint that the
  /// job has written is resumed nevertheless.
  bool overwrite = false;
  /// Config keys that may differ between the checkpoint and the resumed run.
  std::vector<std::string> may_differ = {"epochs", "world_size", "multi_gpu"};
};

/// Result of open_run_folder().
struct RunFolder {
  std::filesystem::path checkpoint;            ///< Path of this run's checkpoint.
  std::optional<CheckpointInfo> to_resume;     ///< Set if there is a checkpoint to resume from.
  std::shared_ptr<const void> lock = nullptr;  ///< On rank 0: locks the folder against other processes.
};

/// Prepares `folder` for a run that `config` (a JSON object) describes. Collective; rank 0 accesses the disk. If the
/// folder holds a checkpoint of the same run, the run resumes. If the checkpoint is missing, the newest intact one
/// beside it (CheckpointOptions::keep) gets its name. Throws InvalidArgument
/// - if the folder holds another run, which differs in more than `may_differ`, unless `overwrite` is set,
/// - with `resume`, if there is no run,
/// - if the folder is not writable,
/// - if another process has locked the folder for longer than some seconds.
RunFolder open_run_folder(const std::filesystem::path& folder, const std::string& config,
                          const RunFolderOptions& options, const ProcessGroup& group);

/// Returns the folder of a run that names none: checkpoints/PROGRAM/run-N below the working directory. Creates a folder
/// with a new number. With `resume`, and in a job that a launcher restarts, returns the last folder instead. Throws
/// InvalidArgument if there is nothing to resume.
std::filesystem::path default_run_folder(const std::string& program, bool resume);

/// Returns the folder checkpoints/PROGRAM/run-N with the highest number; empty if there is none.
std::filesystem::path last_run_folder(const std::string& program);

}  // namespace ddpkit::train
