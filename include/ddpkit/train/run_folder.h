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
  bool resume = false;  ///< There must be a run to go on with.
  /// Replace what is there. Under a launcher that starts a failed job anew (TORCHELASTIC_RESTART_COUNT), what the job
  /// itself has written is gone on with all the same.
  bool overwrite = false;
  /// Keys of the config in which a resumed run may differ from what it was.
  std::vector<std::string> may_differ = {"epochs", "world_size", "multi_gpu"};
};

/// What open_run_folder() found.
struct RunFolder {
  std::filesystem::path checkpoint;            ///< Where this run's checkpoint goes.
  std::optional<CheckpointInfo> to_resume;     ///< Set when there is a checkpoint to go on from.
  std::shared_ptr<const void> lock = nullptr;  ///< Of rank 0: keeps other processes out for as long as it is held.
};

/// Makes `folder` ready for a run that `config` (a JSON object) describes. Collective; rank 0 looks at the disk.
///
/// A run that is there is gone on with. Nothing that took work is lost by accident: where it is another one, which
/// differs in more than `may_differ`, InvalidArgument is thrown, unless it is to be overwritten; also with `resume`
/// where there is none, and for a folder that cannot be written to, before the training rather than after its first
/// epoch; and where another process has a RunFolder of it, which does not end within some seconds. Where the checkpoint
/// itself is missing, the newest good one that is beside it (CheckpointOptions::keep) takes its name.
RunFolder open_run_folder(const std::filesystem::path& folder, const std::string& config,
                          const RunFolderOptions& options, const ProcessGroup& group);

}  // namespace ddpkit::train
