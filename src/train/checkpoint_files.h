// The checkpoint files of a run: finds them and replaces old files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "train/sealed_file.h"

namespace ddpkit::train {

struct CheckpointFiles {
  std::filesystem::path path;
  int keep = 1;  ///< See CheckpointOptions.
  std::int64_t step = 0;
  std::optional<std::filesystem::path> best = std::nullopt;  ///< Also write the new checkpoint to this path.
  std::string best_epoch_stem = {};                          ///< See CheckpointOptions. Empty unless `best` is set.
  std::int64_t best_epoch = 0;
};

/// Writes the archive from `write` and its seal to all names of the new checkpoint, `path` last. Then removes
/// checkpoints that are too old. Throws Error; the previous checkpoint is then unchanged.
void write_checkpoint_files(const CheckpointFiles& files, const std::function<void(const Sink&)>& write);

/// Returns the names of the shards' files of `path`, of `best`, and of the siblings of `path`.
std::vector<std::string> shards_beside(const std::filesystem::path& path, const std::filesystem::path& best);

/// Returns the newest intact file among the siblings of `path` that CheckpointOptions::keep keeps.
std::optional<std::filesystem::path> newest_good_checkpoint(const std::filesystem::path& path);

}  // namespace ddpkit::train
