#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <new>

namespace ddpkit::shm {
namespace {

/// Pages are asked for in steps of this size.
constexpr std::size_t kStep = std::size_t{2} << 20;
constexpr std::size_t kPage = 4096;
/// A request may take a free block of up to this many classes above its own: twice its size.
constexpr std::size_t kClassesAbove = 4;

}  // namespace

/// Stands before the caller's bytes.
struct alignas(kCacheLine) Arena::Block {
  std::size_t size_class;
  Block* next;  ///< In the free list.
};

Arena::Arena(std::shared_ptr<SymmetricSegment> segment, int rank, std::size_t reserve)
    : segment_(std::move(segment)),
      begin_(segment_->base[static_cast<std::size_t>(rank)]),
      end_(begin_.load() + segment_->bytes),
      limit_(segment_->bytes - std::min(reserve, segment_->bytes)) {
  stats_.capacity = segment_->bytes;
  // In a child process, writes to shared pages would reach this one's tensors.
  ::madvise(begin_, segment_->bytes, MADV_DONTFORK);
}

std::size_t Arena::class_of(std::size_t bytes) noexcept {
  const auto log2 = static_cast<std::size_t>(std::bit_width(bytes) - 1);
  const std::size_t quarter = std::size_t{1} << (log2 - 2);
  const std::size_t above = bytes - (std::size_t{1} << log2);
  return log2 * 4 + (above + quarter - 1) / quarter;  // Four quarters are the next doubling's first class.
}

std::size_t Arena::class_bytes(std::size_t size_class) noexcept {
  const std::size_t log2 = size_class / 4;
  return (std::size_t{1} << log2) + size_class % 4 * (std::size_t{1} << (log2 - 2));
}

void* Arena::allocate(std::size_t bytes, bool urgent) noexcept {
  const std::lock_guard lock(mutex_);
  if (closed_) return nullptr;
  if (bytes > stats_.capacity) {  // Of the largest numbers there is no size class.
    ++stats_.refused;
    return nullptr;
  }
  const std::size_t size_class = class_of(std::max(bytes, kSmallest) + sizeof(Block));
  Block* block = nullptr;
  for (std::size_t c = size_class; c <= size_class + kClassesAbove && c < kClasses && !block; ++c) {
    if (!free_[c]) continue;
    // A larger block is better than none, but new memory is better than a larger block.
    if (c > size_class && used_ + class_bytes(size_class) <= limit_) break;
    block = free_[c];
    free_[c] = block->next;
  }
  if (!block) {
    const std::size_t end = used_ + class_bytes(size_class);
    if (end > (urgent ? stats_.capacity : limit_) || !grow(end)) {
      ++stats_.refused;
      return nullptr;
    }
    block = new (begin_ + used_) Block{.size_class = size_class, .next = nullptr};
    used_ = end;
  }
  ++stats_.allocations;
  stats_.in_use += class_bytes(block->size_class);
  stats_.peak = std::max(stats_.peak, stats_.in_use);
  return block + 1;
}

bool Arena::grow(std::size_t end) noexcept {
  if (end <= populated_) return true;
  const std::size_t wanted = std::min(stats_.capacity, (end + kStep - 1) / kStep * kStep);
  if (const std::size_t available = available_memory(); available != 0 && wanted - populated_ > available) return false;
  // Unlike a first touch, which would end in SIGBUS, this fails with an error when memory runs out. A kernel before
  // 5.14 does not know it (EINVAL), and leaves the pages to the first touch.
  const std::size_t from = populated_ / kPage * kPage;
  if (::madvise(begin_ + from, wanted - from, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) return false;
  populated_ = wanted;
  return true;
}

void Arena::free(void* data) noexcept {
  const std::lock_guard lock(mutex_);
  Block* block = static_cast<Block*>(data) - 1;
  block->next = free_[block->size_class];
  free_[block->size_class] = block;
  stats_.in_use -= class_bytes(block->size_class);
  release_if_over();
}

void Arena::keep_place() const noexcept {
  std::byte* const begin = begin_;
  const std::byte* const end = end_;
  if (!begin || !end) return;
  ::mmap(begin, static_cast<std::size_t>(end - begin), PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void Arena::close() noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  release_if_over();
}

void Arena::release_if_over() noexcept {
  if (!closed_ || stats_.in_use != 0) return;
  // In this order: contains() must not take for the arena's what the system puts where its pages were, nor, finding one
  // of these null and not the other, everything below the end.
  end_ = nullptr;
  begin_ = nullptr;
  segment_.reset();
}

ArenaStats Arena::stats() const {
  const std::lock_guard lock(mutex_);
  ArenaStats stats = stats_;
  stats.reserved = populated_;
  return stats;
}

}  // namespace ddpkit::shm
