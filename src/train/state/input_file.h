// Tier 0. A file with random access.
#pragma once

#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>

namespace ddpkit::train {

/// An error in a file's content, without the file's name, which the caller adds.
class BadFile : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class InputFile {
 public:
  /// Throws BadFile with the reason from the operating system.
  explicit InputFile(const std::filesystem::path& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  std::uint64_t size() const noexcept { return size_; }
  /// Throws BadFile if the file is too short.
  void read(std::uint64_t offset, void* destination, std::uint64_t bytes) const;
  std::string read(std::uint64_t offset, std::uint64_t bytes) const;

 private:
  void check(std::uint64_t offset, std::uint64_t bytes) const;

  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

}  // namespace ddpkit::train
