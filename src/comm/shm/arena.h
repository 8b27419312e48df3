// Tier 0: the standard library only.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include <ddpkit/comm/arena_stats.h>

#include "comm/shm/engine.h"

namespace ddpkit::shm {

/// A caching allocator in symmetric memory: what a rank allocates here, every rank of the host can read where it
/// stands.
///
/// Blocks come in size classes, four to a doubling. A freed block waits for the next request of its class: a training
/// step asks for the same sizes again and again, so that from the second step on nothing is faulted in and what was
/// freed last, still in the cache, is used first. Once all memory is in blocks, a request that finds none of its class
/// has free neighbours joined, unless that was done a short while ago, and takes a part of a larger free block: so that
/// batches of all lengths share what each needs for itself. Nothing is given back to the system before the arena ends.
/// Its memory is bounded by the segment; pages are taken from the system only as blocks first need them.
///
/// Thread-safe. The object itself must outlive every block; its pages are unmapped when it is closed and the last block
/// has been freed.
class Arena {
 public:
  /// Smaller requests are not for an arena: malloc keeps them in the cache as well.
  static constexpr std::size_t kSmallest = 4096;

  /// `reserve` bytes of the segment are kept for urgent requests.
  Arena(std::shared_ptr<SymmetricSegment> segment, int rank, std::size_t reserve);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Aligned to 64 bytes; null when the arena is full, closed, or the system has no more memory.
  void* allocate(std::size_t bytes, bool urgent = false) noexcept;
  void free(void* data) noexcept;
  /// Whether `data` lies in the arena's pages; any pointer may be asked about.
  bool contains(const void* data) const noexcept { return data >= begin_.load() && data < end_.load(); }
  /// In a child process: nothing else comes to lie where its pages are in the parent.
  void keep_place() const noexcept;
  /// No more blocks are handed out.
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
  std::atomic<std::byte*> begin_{nullptr};
  std::atomic<std::byte*> end_{nullptr};
  std::size_t limit_ = 0;                ///< Of what is not urgent.
  std::size_t used_ = 0;                 ///< Bytes from the start that blocks have been cut from.
  std::size_t populated_ = 0;            ///< Bytes from the start that have pages.
  std::size_t freed_ = 0;                ///< Bytes, since neighbours were last joined.
  std::array<Block*, kClasses> free_{};  ///< [size class]
  bool closed_ = false;
  ArenaStats stats_;
};

}  // namespace ddpkit::shm
