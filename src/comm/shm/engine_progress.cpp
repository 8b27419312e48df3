// Progress of collectives: match, arrive, reduce, finish. All functions require the engine's mutex.
#include <algorithm>
#include <cstring>

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

std::byte* Engine::slot(int rank, std::uint64_t ticket) const noexcept {
  return staging_[static_cast<std::size_t>(rank)].data() + ticket % kSlots * kSlotBytes;
}

bool Engine::all_reached(std::atomic<std::uint64_t> Progress::*count, std::uint64_t enough) const noexcept {
  for (int r = 0; r < world_size_; ++r) {
    if ((block(r).progress.*count).load() < enough) return false;
  }
  return true;
}

bool Engine::progress() {
  bool moved = false;
  try {
    for (bool again = true; again; moved |= again) {
      again = match();
      again |= arrive();
      again |= reduce_slices();
      again |= finish();
      if (!mailbox_) continue;
      if (!mailbox_->idle()) again |= mailbox_->progress([this](int peer) { ring(peer); });
      mailbox_->take_finished(
          [this](const MessageHandle& message) { complete(message, message->on_finish, message->keep_alive); });
    }
  } catch (const CollectiveMismatch& error) {
    fail(FailureKind::kMismatch, error.what(), error.context().rank);
  }
  notify_peers();
  // The background thread sleeps on this rank's bell.
  if (moved && !background_.empty()) ring(rank_);
  return moved;
}

bool Engine::match() {
  bool moved = false;
  for (;;) {
    resolve();
    const std::uint64_t sequence = mine().matched.load(std::memory_order_relaxed);
    Operation* operation = at(sequence);
    if (!operation || !all_reached(&Progress::posted, sequence + 1)) return moved;
    compare_headers(peers_, operation->header);
    // After every rank has matched, the headers may be overwritten.
    if (operation->path == Path::kUnknown) agree(*operation);
    raise(mine().matched, sequence + 1);
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
  return ticket < kSlots || all_reached(&Progress::finished, ticket - kSlots + 1);
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
      copy_in(operation, ticket);
    }
    raise(mine().arrived, ticket + 1);
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
        !all_reached(&Progress::arrived, ticket + 1))
      return moved;
    if (operation.shared_reduce) {
      reduce_slice(operation, ticket);
      raise(mine().reduced, ticket + 1);
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
    if (operation.shared_reduce && !all_reached(&Progress::reduced, ticket + 1)) return moved;
    const std::uint64_t next = mine().arrived.load(std::memory_order_relaxed);
    const bool along = can_copy_along(operation, next) && slot_is_free(next);
    copy_out(operation, ticket, along ? std::optional(next) : std::nullopt);
    if (along) raise(mine().arrived, next + 1);
    raise(mine().finished, ticket + 1);
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

void Engine::copy_in(const Operation& operation, std::uint64_t ticket) {
  const Request& request = operation.request;
  const std::size_t size = operation.element_size();
  const SlotLayout layout = slot_layout(request.kind, world_size_);
  const std::size_t step = layout.piece_bytes / size;
  const std::uint64_t chunk = ticket - operation.first_ticket;
  std::byte* const own = slot(rank_, ticket);
  const auto self = static_cast<std::size_t>(rank_);  // This rank's piece for itself needs no slot.
  const auto copy_piece = [&](std::size_t piece, const void* input, std::size_t numel) {
    const Span span = chunk_of(numel, step, chunk);
    if (span.count == 0) return;
    std::memcpy(own + layout.table_bytes + piece * layout.piece_bytes,
                static_cast<const std::byte*>(input) + span.begin * size, span.count * size);
  };
  switch (request.kind) {
    case CollectiveKind::kBarrier:
    case CollectiveKind::kAllReduceCoalesced:
    case CollectiveKind::kReduceScatterCoalesced:
      break;
    case CollectiveKind::kBroadcast:
      if (request.root == rank_) copy_piece(0, request.input, request.numel);
      break;
    case CollectiveKind::kScatter:
      if (request.root != rank_) break;
      [[fallthrough]];
    case CollectiveKind::kReduceScatter:
      for (std::size_t r = 0; r < layout.pieces; ++r) {
        if (r != self) copy_piece(r, request.inputs[r], request.numel);
      }
      break;
    case CollectiveKind::kAllToAll:
      for (std::size_t r = 0; r < layout.pieces; ++r) {
        const std::uint64_t count = request.send_numel[r];
        std::memcpy(own + r * sizeof count, &count, sizeof count);
        if (r != self) copy_piece(r, request.inputs[r], request.send_numel[r]);
      }
      break;
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
      if (operation.shared_reduce) {
        copy_others_slices(operation, ticket);
        break;
      }
      [[fallthrough]];
    case CollectiveKind::kAllGather:
    case CollectiveKind::kGather:
      copy_piece(0, request.input, request.numel);
      break;
  }
}

/// Copies the slices that the peers reduce. This rank reduces its slice directly from the input.
void Engine::copy_others_slices(const Operation& operation, std::uint64_t ticket) {
  const std::size_t size = operation.element_size();
  const Span chunk = chunk_of(operation.request.numel, kSlotBytes / size, ticket - operation.first_ticket);
  const auto* input = static_cast<const std::byte*>(operation.request.input) + chunk.begin * size;
  for (int r = 0; r < world_size_; ++r) {
    const Span slice = slice_of(chunk.count, size, r, world_size_);
    if (r != rank_ && slice.count != 0)
      std::memcpy(slot(rank_, ticket) + slice.begin * size, input + slice.begin * size, slice.count * size);
  }
}

void Engine::reduce_slice(const Operation& operation, std::uint64_t ticket) {
  if (operation.path == Path::kSymmetric) return move_in_place(operation);
  const Request& request = operation.request;
  const std::size_t size = operation.element_size();
  const Span chunk = chunk_of(request.numel, kSlotBytes / size, ticket - operation.first_ticket);
  const Span slice = slice_of(chunk.count, size, rank_, world_size_);
  if (slice.count == 0) return;
  const auto self = static_cast<std::size_t>(rank_);
  for (int r = 0; r < world_size_; ++r) parts_[static_cast<std::size_t>(r)] = slot(r, ticket) + slice.begin * size;
  // To this rank's slot, from which the others copy it, and to this rank's output.
  const std::size_t begin = (chunk.begin + slice.begin) * size;
  void* outputs[] = {parts_[self], request.output ? static_cast<std::byte*>(request.output) + begin : nullptr};
  parts_[self] = const_cast<std::byte*>(static_cast<const std::byte*>(request.input)) + begin;
  kernels::reduce({.dtype = request.dtype,
                   .op = request.op,
                   .numel = slice.count,
                   .inputs = parts_.data(),
                   .input_count = parts_.size(),
                   .outputs = outputs,
                   .output_count = wants_result(request) ? 2u : 1u});
}

void Engine::copy_out(const Operation& operation, std::uint64_t ticket, std::optional<std::uint64_t> along) {
  const Request& request = operation.request;
  if (operation.path == Path::kSymmetric) return;
  const std::size_t size = operation.element_size();
  const SlotLayout layout = slot_layout(request.kind, world_size_);
  const std::size_t step = layout.piece_bytes / size;
  const std::uint64_t chunk = ticket - operation.first_ticket;
  const auto own = static_cast<std::size_t>(rank_);
  // Returns piece `piece` of rank `rank`: `input` for this rank, otherwise in the rank's slot.
  const auto given = [&](int rank, std::size_t piece, const void* input) {
    return rank == rank_ ? static_cast<const std::byte*>(input) + chunk * step * size
                         : slot(rank, ticket) + layout.table_bytes + piece * layout.piece_bytes;
  };
  const auto copy_piece = [&](void* output, std::size_t numel, const std::byte* from) {
    const Span span = chunk_of(numel, step, chunk);
    std::byte* to = static_cast<std::byte*>(output) + span.begin * size;
    if (span.count != 0 && to != from) std::memcpy(to, from, span.count * size);
  };
  const auto reduce_piece = [&](std::size_t piece, const void* input) {
    const Span span = chunk_of(request.numel, step, chunk);
    if (span.count == 0) return;
    for (int r = 0; r < world_size_; ++r)
      parts_[static_cast<std::size_t>(r)] = const_cast<std::byte*>(given(r, piece, input));
    void* output = static_cast<std::byte*>(request.output) + span.begin * size;
    kernels::reduce({.dtype = request.dtype,
                     .op = request.op,
                     .numel = span.count,
                     .inputs = parts_.data(),
                     .input_count = parts_.size(),
                     .outputs = &output,
                     .output_count = 1,
                     .copy_from = along ? static_cast<const std::byte*>(request.input) +
                                              (*along - operation.first_ticket) * step * size
                                        : nullptr,
                     .copy_to = along ? slot(rank_, *along) : nullptr});
  };
  switch (request.kind) {
    case CollectiveKind::kBarrier:
    case CollectiveKind::kAllReduceCoalesced:
    case CollectiveKind::kReduceScatterCoalesced:
      break;
    case CollectiveKind::kBroadcast:
      if (request.root != rank_) copy_piece(request.output, request.numel, given(request.root, 0, nullptr));
      break;
    case CollectiveKind::kScatter:
      copy_piece(request.output, request.numel,
                 given(request.root, own, request.root == rank_ ? request.inputs[own] : nullptr));
      break;
    case CollectiveKind::kReduceScatter:
      reduce_piece(own, request.inputs[own]);
      break;
    case CollectiveKind::kAllToAll:
      for (int r = 0; r < world_size_; ++r) {
        const auto index = static_cast<std::size_t>(r);
        if (chunk == 0) compare_counts(peers_, operation, r, slot(r, ticket));
        copy_piece(request.outputs[index], request.receive_numel[index], given(r, own, request.inputs[own]));
      }
      break;
    case CollectiveKind::kGather:
      if (request.root != rank_) break;
      [[fallthrough]];
    case CollectiveKind::kAllGather:
      for (int r = 0; r < world_size_; ++r)
        copy_piece(request.outputs[static_cast<std::size_t>(r)], request.numel, given(r, 0, request.input));
      break;
    case CollectiveKind::kReduce:
    case CollectiveKind::kAllReduce: {
      if (!wants_result(request)) break;
      if (!operation.shared_reduce) return reduce_piece(0, request.input);
      const Span span = chunk_of(request.numel, step, chunk);
      std::byte* output = static_cast<std::byte*>(request.output) + span.begin * size;
      for (int r = 0; r < world_size_; ++r) {
        const Span slice = slice_of(span.count, size, r, world_size_);
        if (r != rank_ && slice.count != 0)
          std::memcpy(output + slice.begin * size, slot(r, ticket) + slice.begin * size, slice.count * size);
      }
      break;
    }
  }
}

}  // namespace ddpkit::shm
