// Tier 0. Files with a checksum at the end.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace ddpkit::train {

using Sink = std::function<void(const void* data, std::size_t bytes)>;

/// Forwards a zip archive and appends a checksum of it as the archive's comment. The result is a valid zip archive.
class Seal {
 public:
  explicit Seal(Sink sink) : sink_(std::move(sink)) {}

  void write(const void* data, std::size_t bytes);
  /// Call after the archive's last byte.
  void finish();

 private:
  void pass_on(const void* data, std::size_t bytes);

  Sink sink_;
  std::uint32_t checksum_ = 0;
  std::array<char, 2> held_{};  ///< The last two bytes; finally the length of the comment.
  std::size_t held_bytes_ = 0;
};

/// Returns the content of the file `path`. Error messages call it `what`. Throws InvalidArgument if the file is missing
/// or cannot be read.
std::string read_file_bytes(const std::filesystem::path& path, std::string_view what);

enum class SealState { kWhole, kNone, kBroken };
/// kNone: no checksum at the end, because the file is truncated or was written by another program.
SealState check_seal(std::string_view bytes);

}  // namespace ddpkit::train
