// Tier 0: the standard library only.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include <ddpkit/comm/arena_stats.h>

#include "comm/shm/segments.h"

namespace ddpkit::shm {

/// A caching allocator in symmetric memory. Every rank of the host can read the blocks that a rank allocates.
///
/// Blocks have size classes, four per doubling. A freed block is kept for the next request of its class. A training
/// step requests the same sizes each time, so from the second step on there are no page faults, and the block that was
/// freed last, which is still in the cache, is used first. If all memory is in blocks, and no block of the class is
/// free, free neighbours are joined (unless that was done recently) and a part of a larger free block is used. So
/// batches of different lengths share the memory. Memory is returned to the system only when the arena ends. The
/// segment limits the size; pages are allocated when blocks first need them.
///
/// Thread-safe. The object must outlive every block. Its pages are unmapped when the arena is closed and the last block
/// has been freed.
class Arena {
 public:
  /// Minimum size. malloc keeps smaller blocks in the cache as well.
  static constexpr std::size_t kSmallest = 4096;

  /// `reserve`: bytes of the segment that are kept for urgent requests.
  Arena(std::shared_ptr<SymmetricSegment> segment, int rank, std::size_t reserve);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Returns memory aligned to 64 bytes; null if the arena is full or closed, or if the system has no memory.
  void* allocate(std::size_t bytes, bool urgent = false) noexcept;
  void free(void* data) noexcept;
  /// Returns whether `data`, any pointer, is in the arena's pages.
  bool contains(const void* data) const noexcept { return data >= begin_.load() && data < end_.load(); }
  /// Returns this rank's pages, for a segment of another group.
  Mapping pages() const;
  /// Continues in a segment with these pages, as rank `rank`. All blocks remain.
  void move_to(std::shared_ptr<SymmetricSegment> segment, int rank) noexcept;
  /// Call in a child process: reserves the addresses of the parent's pages.
  void keep_place() const noexcept;
  /// Stops the allocation of blocks.
  void close() noexcept;

  ArenaStats stats() const;

 private:
  struct Block;
  static constexpr std::size_t kClasses = 4 * 64;

  static std::size_t class_of(std::size_t bytes) noexcept;
  static std::size_t class_within(std::size_t bytes) noexcept;
  static std::size_t class_bytes(std::size_t size_class) noexcept;
  void wait(Block* block) noexcept;
  Block* take(std::size_t size_class) noexcept;
  Block* cut(std::size_t bytes, std::size_t limit) noexcept;
  Block* take_part(std::size_t size_class) noexcept;
  void join_neighbours() noexcept;
  bool grow(std::size_t end) noexcept;
  void release_if_over() noexcept;

  mutable std::mutex mutex_;
  std::shared_ptr<SymmetricSegment> segment_;
  std::size_t rank_;
  std::atomic<std::byte*> begin_{nullptr};
  std::atomic<std::byte*> end_{nullptr};
  std::size_t limit_ = 0;                ///< Limit for requests that are not urgent.
  std::size_t used_ = 0;                 ///< Bytes from the start that are in blocks.
  std::size_t populated_ = 0;            ///< Bytes from the start that have pages.
  std::size_t freed_ = 0;                ///< Bytes freed since neighbours were last joined.
  std::array<Block*, kClasses> free_{};  ///< [size class]
  bool closed_ = false;
  ArenaStats stats_;
};

}  // namespace ddpkit::shm
