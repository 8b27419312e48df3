#include "comm/shm/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <new>

#include "comm/host.h"

namespace ddpkit::shm {
namespace {

/// Pages are allocated in steps of this size.
constexpr std::size_t kStep = std::size_t{2} << 20;
constexpr std::size_t kPage = 4096;
/// join_neighbours() visits every block, so it runs only after 1 / kJoinShare of the memory was freed since its last
/// run.
constexpr std::size_t kJoinShare = 64;

}  // namespace

/// The header before the caller's bytes. The next block follows these bytes.
struct alignas(kCacheLine) Arena::Block {
  std::size_t bytes;  ///< Including the header; at least the size of its free list's class.
  bool is_free;
  Block* next;  ///< Next in the free list.
};

Arena::Arena(std::shared_ptr<SymmetricSegment> segment, int rank, std::size_t reserve)
    : segment_(std::move(segment)),
      rank_(static_cast<std::size_t>(rank)),
      begin_(segment_->base[rank_]),
      end_(begin_.load() + segment_->bytes),
      limit_(segment_->bytes - std::min(reserve, segment_->bytes)) {
  stats_.capacity = segment_->bytes;
  // A child process must not write to the shared pages: they hold this process's tensors.
  ::madvise(begin_, segment_->bytes, MADV_DONTFORK);
}

std::size_t Arena::class_of(std::size_t bytes) noexcept {
  const auto log2 = static_cast<std::size_t>(std::bit_width(bytes) - 1);
  const std::size_t quarter = std::size_t{1} << (log2 - 2);
  const std::size_t above = bytes - (std::size_t{1} << log2);
  return log2 * 4 + (above + quarter - 1) / quarter;  // With four quarters: the first class of the next doubling.
}

/// Returns the largest class for which a block of `bytes` is large enough.
std::size_t Arena::class_within(std::size_t bytes) noexcept {
  const auto log2 = static_cast<std::size_t>(std::bit_width(bytes) - 1);
  return log2 * 4 + ((bytes - (std::size_t{1} << log2)) >> (log2 - 2));
}

std::size_t Arena::class_bytes(std::size_t size_class) noexcept {
  const std::size_t log2 = size_class / 4;
  return (std::size_t{1} << log2) + size_class % 4 * (std::size_t{1} << (log2 - 2));
}

void* Arena::allocate(std::size_t bytes, bool urgent) noexcept {
  const std::lock_guard lock(mutex_);
  if (closed_) return nullptr;
  if (bytes > stats_.capacity) {  // The largest numbers have no size class.
    ++stats_.refused;
    return nullptr;
  }
  const std::size_t size_class = class_of(std::max(bytes, kSmallest) + sizeof(Block));
  Block* block = take(size_class);
  if (!block) block = cut(class_bytes(size_class), urgent ? stats_.capacity : limit_);
  if (!block && freed_ >= used_ / kJoinShare) {
    join_neighbours();
    block = take(size_class);
  }
  if (!block) block = take_part(size_class);
  if (!block) {
    ++stats_.refused;
    return nullptr;
  }
  ++stats_.allocations;
  stats_.in_use += block->bytes;
  stats_.peak = std::max(stats_.peak, stats_.in_use);
  return block + 1;
}

void Arena::wait(Block* block) noexcept {
  Block*& first = free_[class_within(block->bytes)];
  block->is_free = true;
  block->next = first;
  first = block;
}

Arena::Block* Arena::take(std::size_t size_class) noexcept {
  Block* const block = free_[size_class];
  if (!block) return nullptr;
  free_[size_class] = block->next;
  block->is_free = false;
  return block;
}

/// Creates a block from unused memory, up to `limit` bytes from the start.
Arena::Block* Arena::cut(std::size_t bytes, std::size_t limit) noexcept {
  const std::size_t end = used_ + bytes;
  if (end > limit || !grow(end)) return nullptr;
  auto* const block = new (begin_ + used_) Block{.bytes = bytes, .is_free = false, .next = nullptr};
  used_ = end;
  return block;
}

/// Takes a part of the smallest larger block. The rest stays free.
Arena::Block* Arena::take_part(std::size_t size_class) noexcept {
  const std::size_t bytes = class_bytes(size_class);
  Block* block = nullptr;
  for (std::size_t larger = size_class + 1; larger < kClasses && !block; ++larger) block = take(larger);
  if (!block || block->bytes - bytes < class_bytes(class_of(kSmallest + sizeof(Block)))) return block;
  wait(new (reinterpret_cast<std::byte*>(block) + bytes)
           Block{.bytes = block->bytes - bytes, .is_free = true, .next = nullptr});
  block->bytes = bytes;
  return block;
}

void Arena::join_neighbours() noexcept {
  free_.fill(nullptr);
  const auto at = [this](std::size_t place) { return reinterpret_cast<Block*>(begin_ + place); };
  for (std::size_t place = 0; place < used_; place += at(place)->bytes) {
    Block* const block = at(place);
    if (!block->is_free) continue;
    for (std::size_t next = place + block->bytes; next < used_ && at(next)->is_free; next = place + block->bytes)
      block->bytes += at(next)->bytes;
    wait(block);
  }
  freed_ = 0;
}

bool Arena::grow(std::size_t end) noexcept {
  if (end <= populated_) return true;
  const std::size_t wanted = std::min(stats_.capacity, (end + kStep - 1) / kStep * kStep);
  if (const std::size_t available = ddpkit::available_memory(); available != 0 && wanted - populated_ > available)
    return false;
  // If there is no memory, this fails with an error, while a first touch would raise SIGBUS. Kernels before 5.14 do not
  // support it (EINVAL); then the first touch allocates the pages.
  const std::size_t from = populated_ / kPage * kPage;
  if (::madvise(begin_ + from, wanted - from, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) return false;
  populated_ = wanted;
  return true;
}

void Arena::free(void* data) noexcept {
  const std::lock_guard lock(mutex_);
  Block* const block = static_cast<Block*>(data) - 1;
  wait(block);
  freed_ += block->bytes;
  stats_.in_use -= block->bytes;
  release_if_over();
}

Mapping Arena::pages() const {
  const std::lock_guard lock(mutex_);
  return segment_->mappings[rank_].copy();
}

void Arena::move_to(std::shared_ptr<SymmetricSegment> segment, int rank) noexcept {
  const std::lock_guard lock(mutex_);
  std::swap(segment_, segment);
  rank_ = static_cast<std::size_t>(rank);
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
  // In this order, so that contains() is never true for other memory: neither for memory that the system maps at these
  // addresses later, nor for addresses below end_ while begin_ is null.
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
