// Allows one training per folder.
#pragma once

#include <filesystem>
#include <memory>

namespace ddpkit::train {

/// Locks `folder` against other processes until the last copy of the result is destroyed. The kernel releases the lock
/// of a dead process. Waits some seconds for a process that is about to end, then throws InvalidArgument. Does not lock
/// on file systems without locks, or folders that cannot be opened.
std::shared_ptr<const void> lock_folder(const std::filesystem::path& folder);

/// Waits some seconds for a process that is about to end and has locked the temporary file of `path`: see AtomicFile.
/// Then throws InvalidArgument.
void wait_for_writer(const std::filesystem::path& path);

}  // namespace ddpkit::train
