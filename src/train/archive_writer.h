// Tier 0.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <utility>

namespace ddpkit::train {

/// What torch's archives hand their bytes to. Torch calls it from C code, which no exception may cross: the first one
/// is kept, and torch finishes.
class ArchiveWriter {
 public:
  explicit ArchiveWriter(std::function<void(const void* data, std::size_t bytes)> sink) : sink_(std::move(sink)) {}

  std::size_t write(const void* data, std::size_t bytes) noexcept {
    try {
      if (!failure_) sink_(data, bytes);
    } catch (...) {
      failure_ = std::current_exception();
    }
    return bytes;
  }

  /// After the archive's end. Throws what write() has kept.
  void finish() {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::function<void(const void* data, std::size_t bytes)> sink_;
  std::exception_ptr failure_;
};

}  // namespace ddpkit::train
