// Tier 0: the standard library only.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "comm/shm/mapping.h"

namespace ddpkit::shm {

/// Shared pages as one rank's user sees them: reading shows what the ranks have written to them; writing makes a
/// private copy of the place, which this rank alone sees until renew().
///
/// So what several ranks do alike to memory that they share (scale a weight, load a checkpoint) happens once on each,
/// as on memory of their own, and not as often as there are ranks.
///
/// The pages are mapped read-only. The first write to each granule raises SIGSEGV, for which this class installs a
/// handler (others' faults go on to the handler that was there before); it notes the granule and lets the write
/// through. System calls that are given such memory to write to fail with EFAULT instead.
class GuardedView {
 public:
  /// Views there can be in a process at once.
  static constexpr std::size_t kMostViews = 1024;

  /// Of the `bytes` behind the owner's descriptor. Throws as open_descriptor() does, and Error without address space.
  GuardedView(const Owner& owner, int fd, std::size_t bytes);
  ~GuardedView();
  GuardedView(const GuardedView&) = delete;
  GuardedView& operator=(const GuardedView&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  std::size_t granule_bytes() const noexcept { return granule_; }
  std::size_t granules() const noexcept { return (bytes_ + granule_ - 1) / granule_; }

  /// Whether anything, or anything of a granule, has been written to since the last renew().
  bool is_written() const noexcept { return written_any_.load(std::memory_order_acquire); }
  bool is_written(std::size_t granule) const noexcept { return written_[granule].load(std::memory_order_acquire); }

  /// Forgets what has been written here: the view shows the shared memory again. Nobody may be writing.
  void renew() noexcept;

 private:
  friend class GuardedViews;
  /// In the signal handler: lets a write to `address` through. False when it lies elsewhere.
  bool let_write(const std::byte* address) noexcept;

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t granule_ = 0;                       ///< Bytes, whole pages.
  std::unique_ptr<std::atomic<bool>[]> written_;  ///< [granule]
  std::atomic<bool> written_any_{false};
};

}  // namespace ddpkit::shm
