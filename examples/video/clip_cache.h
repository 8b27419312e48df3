// Tier 0: the standard library only.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

namespace video {

/// Decoded clips on disk, a file each. Several threads and processes may share a folder.
///
/// A file is found by what its clip was made from (the key: path, size and time of the video, frames, width and
/// height), which it also holds, with a checksum of the pixels: one that is damaged or of another clip is not used. It
/// gets its name only when it is complete. When the bound is reached, nothing more is written: each epoch asks for the
/// clips in another order, where throwing the oldest out would only make room for what is thrown out next.
class ClipCache {
 public:
  /// Makes the folder where it is missing. `most_bytes`: what the folder may hold; of what is left of that, each of
  /// `processes` may write its part. Throws ddpkit::Error with the system's reason.
  ClipCache(std::filesystem::path folder, std::int64_t most_bytes, int processes = 1);

  /// Fills `pixels` with `bytes` bytes; false when they are not there, or not undamaged.
  bool read(const std::string& key, std::uint8_t* pixels, std::size_t bytes);
  /// What cannot be written (no space) is left out.
  void write(const std::string& key, const std::uint8_t* pixels, std::size_t bytes);

  std::int64_t hits() const noexcept { return hits_; }
  std::int64_t damaged() const noexcept { return damaged_; }
  /// Where a clip's file is or would be.
  std::filesystem::path file_of(const std::string& key) const;

 private:
  std::filesystem::path folder_;
  std::atomic<std::int64_t> bytes_left_;
  std::atomic<std::int64_t> hits_ = 0;
  std::atomic<std::int64_t> damaged_ = 0;
  std::atomic<std::int64_t> written_ = 0;
};

}  // namespace video
