#include "comm/arena_allocator.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <fmt/format.h>
#include <pthread.h>

#include <atomic>
#include <memory>
#include <utility>

#include <ddpkit/error.h>

#include "comm/shm/arena.h"

namespace ddpkit {
namespace {

using shm::Arena;

/// Wraps LibTorch's CPU allocator: takes large blocks from an arena.
class ArenaAllocator final : public c10::Allocator {
 public:
  static ArenaAllocator& get() {
    static auto* allocator = [] {
      auto* made = new ArenaAllocator(c10::GetAllocator(c10::kCPU));
      c10::SetAllocator(c10::kCPU, made);
      ::pthread_atfork(nullptr, nullptr, [] { get().leave_to_parent(); });
      return made;
    }();
    return *allocator;
  }

  std::atomic<Arena*> current{nullptr};

  Arena* add(std::unique_ptr<Arena> arena) {
    auto* link = new Link{.arena = std::move(arena), .older = newest_.load()};
    while (!newest_.compare_exchange_weak(link->older, link)) {
    }
    return link->arena.get();
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes >= Arena::kSmallest) {
      if (Arena* arena = current.load(std::memory_order_acquire)) {
        if (void* data = arena->allocate(bytes)) return {data, data, &free_any, c10::Device(c10::kCPU)};
      }
    }
    return base_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return base_->raw_deleter() ? &free_any : nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { base_->copy_data(to, from, bytes); }

  static void free_any(void* data) {
    ArenaAllocator& self = get();
    const Link* link = self.link_of(data);
    if (!link) return self.base_->raw_deleter()(data);
    if (!link->inherited) link->arena->free(data);
  }

 private:
  explicit ArenaAllocator(c10::Allocator* base) : base_(base) {}

  /// All arenas of this process. Never removed, so freeing a tensor needs no lock, also in a child process.
  struct Link {
    std::unique_ptr<Arena> arena;
    Link* older;
    bool inherited = false;  ///< From the parent process, by fork().
  };

  const Link* link_of(const void* data) const {
    const Link* link = newest_.load(std::memory_order_acquire);
    while (link && !link->arena->contains(data)) link = link->older;
    return link;
  }

  /// Called in a child process, which cannot access the arenas' pages. The child neither allocates nor frees blocks.
  void leave_to_parent() {
    current = nullptr;
    for (Link* link = newest_; link; link = link->older) {
      link->inherited = true;
      link->arena->keep_place();
    }
  }

  c10::Allocator* const base_;
  std::atomic<Link*> newest_{nullptr};
};

}  // namespace

bool ScopedArena::taken() { return ArenaAllocator::get().current.load() != nullptr; }

std::shared_ptr<ScopedArena> ScopedArena::open_private(std::size_t capacity) {
  if (taken()) return nullptr;
  auto segment = std::make_shared<shm::SymmetricSegment>();
  segment->bytes = capacity;
  segment->mappings.push_back(shm::Mapping::create("ddpkit-arena", capacity, shm::Mapping::Populate::kLazy));
  segment->mappings[0].close_descriptor();
  segment->base.push_back(segment->mappings[0].data());
  return std::make_shared<ScopedArena>(std::move(segment), 0, 0);
}

ScopedArena::ScopedArena(std::shared_ptr<shm::SymmetricSegment> segment, int rank, std::size_t reserve)
    : arena_(ArenaAllocator::get().add(std::make_unique<Arena>(std::move(segment), rank, reserve))) {
  ArenaAllocator::get().current = arena_;
}

ScopedArena::~ScopedArena() {
  Arena* expected = arena_;
  ArenaAllocator::get().current.compare_exchange_strong(expected, nullptr);
  arena_->close();
}

shm::Mapping ScopedArena::pages() const { return arena_->pages(); }

void ScopedArena::move_to(std::shared_ptr<shm::SymmetricSegment> segment, int rank) noexcept {
  arena_->move_to(std::move(segment), rank);
}

at::Tensor ScopedArena::empty(std::int64_t numel, at::ScalarType dtype) {
  const std::size_t bytes = static_cast<std::size_t>(numel) * c10::elementSize(dtype);
  void* data = arena_->allocate(bytes, true);
  if (!data) {
    const ArenaStats now = stats();
    throw Error(
        fmt::format("the arena of symmetric memory is full: {} bytes requested, {} of {} in use; increase arena_mb "
                    "or disable the arena",
                    bytes, now.in_use, now.capacity));
  }
  return at::from_blob(data, {numel}, &ArenaAllocator::free_any, at::TensorOptions(dtype).device(at::kCPU));
}

bool ScopedArena::contains(const void* data) const noexcept { return arena_->contains(data); }

ArenaStats ScopedArena::stats() const { return arena_->stats(); }

}  // namespace ddpkit
