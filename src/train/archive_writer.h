// Tier 0.
#pragma once

#include <cstddef>
#include <exception>

#include <ddpkit/train/atomic_file.h>

namespace ddpkit::train {

/// What torch's archives hand their bytes to. Torch calls it from C code, which no exception may cross: the first one
/// is kept, and torch finishes.
class ArchiveWriter {
 public:
  explicit ArchiveWriter(AtomicFile& file) : file_(file) {}

  std::size_t write(const void* data, std::size_t bytes) noexcept {
    try {
      if (!failure_) file_.write(data, bytes);
    } catch (...) {
      failure_ = std::current_exception();
    }
    return bytes;
  }

  /// After the archive's end. Throws what write() has kept.
  void commit() {
    if (failure_) std::rethrow_exception(failure_);
    file_.commit();
  }

 private:
  AtomicFile& file_;
  std::exception_ptr failure_;
};

}  // namespace ddpkit::train
