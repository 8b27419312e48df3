// Progress of collectives: match, arrive, reduce, finish. All functions require the engine's mutex.
#include <algorithm>

#include <ddpkit/error.h>

#include "comm/shm/engine.h"
#include "comm/shm/operation.h"

namespace ddpkit::shm {
namespace {

/// From this size, more than two ranks share the reduction of a staged chunk.
constexpr std::size_t kShareFrom = std::size_t{16} << 10;
/// Chunks that a rank copies in before it reduces. It copies the following chunks in while it reduces earlier ones.
constexpr std::uint64_t kAhead = kSlots / 2;

/// Returns whether `ticket` can be copied in while an earlier ticket is reduced.
bool can_copy_along(const Operation& operation, std::uint64_t ticket) {
  return operation.request.kind == CollectiveKind::kAllReduce && operation.path == Path::kStaged &&
         !operation.shared_reduce && ticket >= operation.first_ticket + kAhead &&
         ticket + 1 < operation.first_ticket + operation.tickets;  // The last chunk may be shorter.
}

}  // namespace

Operation* Engine::at(std::uint64_t sequence) const noexcept {
  const std::uint64_t index = sequence - first_sequence_;
  return index < operations_.size() ? operations_[index].get() : nullptr;  // Null for a group of one rank.
}

bool Engine::progress() {
  bool moved = false;
  try {
    for (bool again = true; again; moved |= again) {
      again = match();
      again |= arrive();
      again |= reduce_slices();
      again |= finish();
      if (!mailbox_.idle()) again |= mailbox_.progress([this](int peer) { peers_.wake(peer); });
      mailbox_.take_finished(
          [this](const MessageHandle& message) { complete(message, message->on_finish, message->keep_alive); });
    }
  } catch (const CollectiveMismatch& error) {
    fail(FailureKind::kMismatch, error.what(), error.context().rank);
  }
  peers_.notify_sleepers();
  // The background thread sleeps on this rank's wake-ups.
  if (moved && !background_.empty()) peers_.wake(rank_);
  return moved;
}

bool Engine::match() {
  bool moved = false;
  for (;;) {
    resolve();
    const std::uint64_t sequence = mine().matched.load(std::memory_order_relaxed);
    Operation* operation = at(sequence);
    if (!operation || !peers_.all_reached(&Progress::posted, sequence + 1)) return moved;
    compare_headers(peers_, operation->header);
    // After every rank has matched, the headers may be overwritten.
    if (operation->path == Path::kUnknown) segments_.agree(*operation);
    peers_.publish(mine().matched, sequence + 1);
    moved = true;
  }
}

/// Assigns tickets to collectives, in order, as soon as their number of tickets is known.
void Engine::resolve() {
  for (; Operation* operation = at(resolved_); ++resolved_) {
    if (operation->path == Path::kUnknown) return;  // match() decides the path.
    const CollectiveKind kind = operation->request.kind;
    const bool symmetric = operation->path == Path::kSymmetric;
    const std::size_t piece = operation->largest_piece * operation->element_size();
    const std::size_t step = slot_layout(kind, world_size_).piece_bytes;
    operation->tickets = symmetric || piece == 0 ? 1 : (piece + step - 1) / step;
    const bool reduces = kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce;
    operation->shared_reduce = symmetric || (reduces && world_size_ > 2 && piece >= kShareFrom);
    operation->first_ticket = next_ticket_;
    next_ticket_ += operation->tickets;
  }
}

/// The previous user of the slot is `ticket` - kSlots.
bool Engine::slot_is_free(std::uint64_t ticket) const noexcept {
  return ticket < kSlots || peers_.all_reached(&Progress::finished, ticket - kSlots + 1);
}

bool Engine::arrive() {
  bool moved = false;
  while (arrive_sequence_ < resolved_) {
    const Operation& operation = *at(arrive_sequence_);
    const std::uint64_t ticket = mine().arrived.load(std::memory_order_relaxed);
    if (operation.path == Path::kStaged) {
      if (!slot_is_free(ticket)) return moved;
      // finish() copies it.
      if (can_copy_along(operation, ticket) && ticket >= mine().finished.load(std::memory_order_relaxed) + kAhead)
        return moved;
      copy_in(staging_, operation, ticket);
    }
    peers_.publish(mine().arrived, ticket + 1);
    if (ticket + 1 == operation.first_ticket + operation.tickets) ++arrive_sequence_;
    moved = true;
  }
  return moved;
}

bool Engine::reduce_slices() {
  bool moved = false;
  for (;;) {
    const std::uint64_t ticket = mine().reduced.load(std::memory_order_relaxed);
    if (ticket == mine().arrived.load(std::memory_order_relaxed)) return moved;
    const Operation& operation = *at(reduce_sequence_);
    if (mine().matched.load(std::memory_order_relaxed) <= reduce_sequence_ ||
        !peers_.all_reached(&Progress::arrived, ticket + 1))
      return moved;
    if (operation.shared_reduce) {
      reduce_slice(staging_, operation, ticket);
      peers_.publish(mine().reduced, ticket + 1);
    } else {
      mine().reduced.store(ticket + 1, std::memory_order_release);  // No rank waits for it.
    }
    if (ticket + 1 == operation.first_ticket + operation.tickets) ++reduce_sequence_;
    moved = true;
  }
  return moved;
}

bool Engine::finish() {
  bool moved = false;
  for (;;) {
    const std::uint64_t ticket = mine().finished.load(std::memory_order_relaxed);
    if (ticket == mine().reduced.load(std::memory_order_relaxed)) return moved;
    Operation& operation = *operations_.front();
    if (operation.shared_reduce && !peers_.all_reached(&Progress::reduced, ticket + 1)) return moved;
    const std::uint64_t next = mine().arrived.load(std::memory_order_relaxed);
    const bool along = can_copy_along(operation, next) && slot_is_free(next);
    if (operation.request.kind == CollectiveKind::kAllToAll && ticket == operation.first_ticket) {
      for (int r = 0; r < world_size_; ++r) compare_counts(peers_, operation, r, staging_.slot(r, ticket));
    }
    copy_out(staging_, operation, ticket, along ? std::optional(next) : std::nullopt);
    if (along) peers_.publish(mine().arrived, next + 1);
    peers_.publish(mine().finished, ticket + 1);
    moved = true;
    if (ticket + 1 < operation.first_ticket + operation.tickets) continue;
    const OperationHandle done = std::move(operations_.front());
    operations_.pop_front();
    ++first_sequence_;
    complete(done, done->request.on_finish, done->request.keep_alive);
    done->segments.clear();
    recorder_.finish(done->record);
  }
}

}  // namespace ddpkit::shm
