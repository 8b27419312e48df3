// Tier 0. Files that tell whether they are whole.
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

/// Passes a zip archive on, and behind it, as the archive's comment, a checksum over all of it. The archive stays one
/// that every reader of zip files takes.
class Seal {
 public:
  explicit Seal(Sink sink) : sink_(std::move(sink)) {}

  void write(const void* data, std::size_t bytes);
  /// After the archive's last byte.
  void finish();

 private:
  void pass_on(const void* data, std::size_t bytes);

  Sink sink_;
  std::uint32_t checksum_ = 0;
  std::array<char, 2> held_{};  ///< The last two bytes, which at the end are the length of the comment.
  std::size_t held_bytes_ = 0;
};

/// All of the file `path`, which messages call `what`. Throws InvalidArgument when it is missing or cannot be read.
std::string read_file_bytes(const std::filesystem::path& path, std::string_view what);

enum class SealState { kWhole, kNone, kBroken };
/// kNone: there is no checksum at the end, as in a file that was cut, or that something else wrote.
SealState check_seal(std::string_view bytes);

}  // namespace ddpkit::train
