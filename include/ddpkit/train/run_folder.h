// Tier 0: the standard library only.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <ddpkit/train/checkpoint.h>

namespace ddpkit {
class ProcessGroup;
}

namespace ddpkit::train {

struct RunFolderOptions {
  bool resume = false;     ///< Go on with the run that is there.
  bool overwrite = false;  ///< Replace it.
  /// Keys of the config in which a resumed run may differ from what it was.
  std::vector<std::string> may_differ = {"epochs", "world_size"};
};

/// What open_run_folder() found.
struct RunFolder {
  std::filesystem::path checkpoint;         ///< Where this run's checkpoint goes.
  std::optional<CheckpointInfo> to_resume;  ///< Set when there is a checkpoint to go on from.
};

/// Makes `folder` ready for a run that `config` (a JSON object) describes. Collective; rank 0 looks at the disk.
///
/// Nothing that took work is lost by accident. Where the folder holds a checkpoint, a run that is neither to resume nor
/// to overwrite goes ahead only when it would repeat that very run, finished: any difference in config, or an epoch
/// below its "epochs", throws InvalidArgument. So does resuming with a config that differs in more than `may_differ`,
/// and a folder that cannot be written to, before the training rather than after its first epoch.
RunFolder open_run_folder(const std::filesystem::path& folder, const std::string& config,
                          const RunFolderOptions& options, const ProcessGroup& group);

}  // namespace ddpkit::train
