// A run's checkpoints as files: which there are, and how a new one takes its place.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>

#include "train/sealed_file.h"

namespace ddpkit::train {

struct CheckpointFiles {
  std::filesystem::path path;
  int keep = 1;  ///< See CheckpointOptions.
  std::int64_t step = 0;
  std::optional<std::filesystem::path> best = std::nullopt;  ///< The new one under this name too.
};

/// Writes the archive that `write` gives, and its seal, to all names of the new checkpoint, `path` last, and removes
/// those that are too old. Throws Error; what stood there then stands.
void write_checkpoint_files(const CheckpointFiles& files, const std::function<void(const Sink&)>& write);

/// The newest of the siblings of `path` that CheckpointOptions::keep leaves, of those that are whole.
std::optional<std::filesystem::path> newest_good_checkpoint(const std::filesystem::path& path);

}  // namespace ddpkit::train
