// Tier 0: the standard library only.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

namespace video {

/// Decoded clips on disk, one file per clip. Several threads and processes may share a folder.
///
/// The key of a file is the source of its clip: path, size and time of the video, frames, width and height. The file
/// also holds the key and a checksum of the pixels. read() rejects damaged files and files of another clip. Writes are
/// atomic. When the limit is reached, nothing more is written: each epoch reads the clips in another order, so evicting
/// old files would not help.
class ClipCache {
 public:
  /// Creates the folder if it is missing. `most_bytes`: limit of the folder. Each of `processes` may write its part of
  /// the remaining space. Throws ddpkit::Error with the system's reason.
  ClipCache(std::filesystem::path folder, std::int64_t most_bytes, int processes = 1);

  /// Fills `pixels` with `bytes` bytes. Returns false if the clip is missing or damaged.
  bool read(const std::string& key, std::uint8_t* pixels, std::size_t bytes);
  /// Skips a clip that cannot be written (no space).
  void write(const std::string& key, const std::uint8_t* pixels, std::size_t bytes);

  std::int64_t hits() const noexcept { return hits_; }
  std::int64_t damaged() const noexcept { return damaged_; }
  /// Returns the path of a clip's file, which may not exist.
  std::filesystem::path file_of(const std::string& key) const;

 private:
  std::filesystem::path folder_;
  std::atomic<std::int64_t> bytes_left_;
  std::atomic<std::int64_t> hits_ = 0;
  std::atomic<std::int64_t> damaged_ = 0;
  std::atomic<std::int64_t> written_ = 0;
};

}  // namespace video
