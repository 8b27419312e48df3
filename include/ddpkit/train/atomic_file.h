// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

namespace ddpkit::train {

/// A file that is written atomically. Data go to a temporary file in the same folder. commit() makes it durable and
/// renames it over the old file. Until then the old file does not change.
///
/// The temporary file is PATH.tmp. A temporary file left by a killed process is overwritten.
class AtomicFile {
 public:
  /// Throws Error, with the system's reason, if the temporary file cannot be created. Throws InvalidArgument if `path`
  /// is a folder, a device or similar, and if another AtomicFile, also of another process, has the same path.
  explicit AtomicFile(std::filesystem::path path);
  /// Removes the temporary file if commit() was not called.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Appends. Throws Error, for example if the disk is full.
  void write(const void* data, std::size_t bytes);
  /// Returns when the file is on the disk under its name. Throws Error.
  void commit();
  /// Call before commit(): also creates the file `name` with the same content, atomically. Throws Error.
  void commit_as(const std::filesystem::path& name);

  /// Makes `name` a second name of the file `path`: a hard link, or a copy if the file system has no links. Replaces an
  /// earlier file `name` atomically. Throws Error.
  static void give_name(const std::filesystem::path& path, const std::filesystem::path& name);

 private:
  [[noreturn]] void fail(const char* what) const;
  bool is_temporary() const;  ///< Returns whether `temporary_` is still the name of the open file.

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
};

/// Writes `text` to a file atomically. Throws as AtomicFile does.
void write_text(const std::filesystem::path& path, const std::string& text);

}  // namespace ddpkit::train
