// One training a folder.
#pragma once

#include <filesystem>
#include <memory>

namespace ddpkit::train {

/// Keeps other processes out of `folder` until the last copy of the result is gone; a process that dies leaves no lock.
/// Waits some seconds for one that is about to end, then throws InvalidArgument. File systems without locks, and
/// folders that cannot be opened, let everyone in.
std::shared_ptr<const void> lock_folder(const std::filesystem::path& folder);

}  // namespace ddpkit::train
