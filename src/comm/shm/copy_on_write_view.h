// Tier 0: the standard library only.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "comm/shm/mapping.h"

namespace ddpkit::shm {

/// A copy-on-write view of shared pages. Reads show the shared content. A write makes a private copy of the granule,
/// which only this rank sees until reset().
///
/// So if all ranks make the same change to shared memory (scale a weight, load a checkpoint), each rank sees the change
/// once, as with private memory.
///
/// The pages are mapped read-only. The first write to each granule raises SIGSEGV. This class installs a handler, which
/// marks the granule and makes it writable. Other faults are passed to the previous handler. System calls that write to
/// such memory fail with EFAULT.
class CopyOnWriteView {
 public:
  /// Maximum number of views in a process.
  static constexpr std::size_t kMostViews = 1024;

  /// Maps `bytes` of the owner's descriptor. Throws like open_descriptor(), and Error if there is no address space.
  CopyOnWriteView(const RankProcessId& owner, int fd, std::size_t bytes);
  ~CopyOnWriteView();
  CopyOnWriteView(const CopyOnWriteView&) = delete;
  CopyOnWriteView& operator=(const CopyOnWriteView&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  std::size_t granule_bytes() const noexcept { return granule_; }
  std::size_t granules() const noexcept { return (bytes_ + granule_ - 1) / granule_; }

  /// Returns whether any granule, or one granule, has been written to since the last reset().
  bool is_written() const noexcept { return written_any_.load(std::memory_order_acquire); }
  bool is_written(std::size_t granule) const noexcept { return written_[granule].load(std::memory_order_acquire); }

  /// Discards this rank's writes: the view shows the shared memory again. No thread may write meanwhile.
  void reset() noexcept;

 private:
  friend class CopyOnWriteViews;
  /// Called in the signal handler: makes the granule of `address` writable. Returns false for other addresses.
  bool let_write(const std::byte* address) noexcept;

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t granule_ = 0;                       ///< Bytes, whole pages.
  std::unique_ptr<std::atomic<bool>[]> written_;  ///< [granule]
  std::atomic<bool> written_any_{false};
};

}  // namespace ddpkit::shm
