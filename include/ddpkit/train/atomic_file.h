// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <filesystem>

namespace ddpkit::train {

/// A file that appears whole or not at all: what is written goes to a temporary file in the same folder, which commit()
/// makes durable and renames over the old one. Whatever happens before that, the old file stays as it was.
///
/// The temporary file is PATH.tmp; one that a killed process left behind is overwritten.
class AtomicFile {
 public:
  /// Throws Error, with the system's reason, when the temporary file cannot be made; InvalidArgument where `path` is a
  /// folder, a device or the like, whose place a file must not take, and while another AtomicFile, of any process, has
  /// the same path.
  explicit AtomicFile(std::filesystem::path path);
  /// Without a commit(), removes the temporary file.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Appends. Throws Error when the disk is full or the like.
  void write(const void* data, std::size_t bytes);
  /// Returns when the file is on the disk under its own name. Throws Error.
  void commit();
  /// Before commit(): what has been written appears under `name` too, in the same way. Throws Error.
  void commit_as(const std::filesystem::path& name);

  /// `name`, too, stands for the file `path` from now on: a hard link, or a copy where the file system has none. What
  /// it stood for is replaced, whole or not at all. Throws Error.
  static void give_name(const std::filesystem::path& path, const std::filesystem::path& name);

 private:
  [[noreturn]] void fail(const char* what) const;
  bool is_temporary() const;  ///< Whether `temporary_` is still the name of the open file.

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
};

}  // namespace ddpkit::train
