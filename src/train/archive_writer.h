// Tier 0.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <utility>

namespace ddpkit::train {

/// Receives the bytes of torch's archives. Torch calls write() from C code, which must not see exceptions. The first
/// exception is stored, and torch continues.
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

  /// Call after the end of the archive. Throws the exception stored by write().
  void finish() {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::function<void(const void* data, std::size_t bytes)> sink_;
  std::exception_ptr failure_;
};

}  // namespace ddpkit::train
