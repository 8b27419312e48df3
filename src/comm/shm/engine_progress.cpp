// How collectives move on: match, arrive, reduce, finish. Everything here runs under the engine's mutex.
#include <cstring>

#include "engine.h"
#include "operation.h"

namespace ddpkit::shm {
namespace {

/// Below this a tensor is staged even where all ranks share its memory: one exchange instead of two.
constexpr std::size_t kStageBelow = std::size_t{32} << 10;
/// From this size on a staged chunk's reduction is shared between more than two ranks.
constexpr std::size_t kShareFrom = std::size_t{16} << 10;

}  // namespace

Operation* Engine::at(std::uint64_t sequence) const noexcept {
  return sequence < next_sequence_ ? operations_[sequence - first_sequence_].get() : nullptr;
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
  for (bool again = true; again; moved |= again) {
    again = match();
    again |= arrive();
    again |= reduce_slices();
    again |= finish();
  }
  return moved;
}

void Engine::locate(Operation& operation) const {
  const Request& request = operation.request;
  if (request.kind != CollectiveKind::kAllReduce || request.input != request.output || operation.bytes() < kStageBelow)
    return;
  const auto* data = static_cast<const std::byte*>(request.input);
  for (const auto& candidate : segments_) {
    auto segment = candidate.lock();
    if (!segment) continue;
    const std::byte* base = segment->base[static_cast<std::size_t>(rank_)];
    if (data < base || data + operation.bytes() > base + segment->bytes) continue;
    operation.header.segment = segment->id;
    operation.header.offset = static_cast<std::uint64_t>(data - base);
    operation.segment = std::move(segment);
    return;
  }
}

bool Engine::match() {
  bool moved = false;
  for (;;) {
    resolve();
    const std::uint64_t sequence = mine().matched.load(std::memory_order_relaxed);
    Operation* operation = at(sequence);
    if (!operation || !all_reached(&Progress::posted, sequence + 1)) return moved;
    compare_headers(*operation);
    // Decided now: once every rank has matched, the headers may be overwritten.
    if (operation->header.segment != 0)
      operation->path = agreed_on_symmetric(*operation) ? Path::kSymmetric : Path::kStaged;
    raise(mine().matched, sequence + 1);
    moved = true;
  }
}

bool Engine::agreed_on_symmetric(const Operation& operation) const {
  for (int r = 0; r < world_size_; ++r) {
    const CollectiveHeader& theirs = block(r).headers[operation.header.sequence % kMaxOutstanding];
    if (theirs.segment != operation.header.segment || theirs.offset != operation.header.offset) return false;
  }
  return true;
}

/// Gives collectives their tickets, in order, as soon as it is known how many each has.
void Engine::resolve() {
  for (; Operation* operation = at(resolved_); ++resolved_) {
    if (operation->header.segment == 0) operation->path = Path::kStaged;
    if (operation->path == Path::kUnknown) return;  // match() will tell.
    const std::size_t bytes = operation->bytes();
    const bool symmetric = operation->path == Path::kSymmetric;
    const std::size_t chunks = (bytes + kSlotBytes - 1) / kSlotBytes;
    operation->tickets = symmetric || chunks == 0 ? 1 : chunks;
    operation->shared_reduce =
        symmetric || (operation->request.kind == CollectiveKind::kAllReduce && world_size_ > 2 && bytes >= kShareFrom);
    operation->first_ticket = next_ticket_;
    next_ticket_ += operation->tickets;
  }
}

bool Engine::arrive() {
  bool moved = false;
  while (arrive_sequence_ < resolved_) {
    const Operation& operation = *at(arrive_sequence_);
    const std::uint64_t ticket = mine().arrived.load(std::memory_order_relaxed);
    if (operation.path == Path::kStaged) {
      // The slot's last user was ticket - kSlots.
      if (ticket >= kSlots && !all_reached(&Progress::finished, ticket - kSlots + 1)) return moved;
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
      mine().reduced.store(ticket + 1);  // Nobody waits for it.
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
    copy_out(operation, ticket);
    raise(mine().finished, ticket + 1);
    moved = true;
    if (ticket + 1 < operation.first_ticket + operation.tickets) continue;
    const OperationHandle done = std::move(operations_.front());
    operations_.pop_front();
    ++first_sequence_;
    if (done->request.on_finish) done->request.on_finish();
    done->request.keep_alive.reset();
    done->segment.reset();
    done->finished = true;
  }
}

void Engine::copy_in(const Operation& operation, std::uint64_t ticket) {
  const Request& request = operation.request;
  const bool contributes = request.kind == CollectiveKind::kAllReduce || request.kind == CollectiveKind::kAllGather ||
                           (request.kind == CollectiveKind::kBroadcast && request.root == rank_);
  if (!contributes || request.numel == 0) return;
  const Span span = chunk_of(operation, ticket - operation.first_ticket);
  const std::size_t size = operation.element_size();
  std::memcpy(slot(rank_, ticket), static_cast<const std::byte*>(request.input) + span.begin * size, span.count * size);
}

void Engine::reduce_slice(const Operation& operation, std::uint64_t ticket) {
  const Request& request = operation.request;
  const bool symmetric = operation.path == Path::kSymmetric;
  const std::size_t size = operation.element_size();
  const std::size_t whole =
      symmetric ? request.numel : chunk_of(operation, ticket - operation.first_ticket).count;
  const Span slice = slice_of(whole, size, rank_, world_size_);
  if (slice.count == 0) return;
  // Everybody's slice, in rank order: the order of the sum, and so its bits, do not depend on who adds.
  std::vector<void*> parts(static_cast<std::size_t>(world_size_));
  for (int r = 0; r < world_size_; ++r) {
    std::byte* start = symmetric ? operation.segment->base[static_cast<std::size_t>(r)] + operation.header.offset
                                 : slot(r, ticket);
    parts[static_cast<std::size_t>(r)] = start + slice.begin * size;
  }
  // Symmetric: the result goes straight to everybody. Staged: into this rank's own slot, from which the others take it.
  void* const* outputs = symmetric ? parts.data() : &parts[static_cast<std::size_t>(rank_)];
  reduce(request.dtype, request.op, slice.count, parts.data(), parts.size(), outputs, symmetric ? parts.size() : 1);
}

void Engine::copy_out(const Operation& operation, std::uint64_t ticket) {
  const Request& request = operation.request;
  if (operation.path == Path::kSymmetric || request.numel == 0) return;
  const Span span = chunk_of(operation, ticket - operation.first_ticket);
  const std::size_t size = operation.element_size();
  std::byte* output = static_cast<std::byte*>(request.output) + span.begin * size;
  switch (request.kind) {
    case CollectiveKind::kBarrier:
      break;
    case CollectiveKind::kBroadcast:
      if (request.root != rank_) std::memcpy(output, slot(request.root, ticket), span.count * size);
      break;
    case CollectiveKind::kAllGather:
      for (int r = 0; r < world_size_; ++r)
        std::memcpy(output + static_cast<std::size_t>(r) * operation.bytes(), slot(r, ticket), span.count * size);
      break;
    case CollectiveKind::kAllReduce:
      if (operation.shared_reduce) {
        for (int r = 0; r < world_size_; ++r) {
          const Span slice = slice_of(span.count, size, r, world_size_);
          std::memcpy(output + slice.begin * size, slot(r, ticket) + slice.begin * size, slice.count * size);
        }
      } else {
        std::vector<const void*> inputs(static_cast<std::size_t>(world_size_));
        for (int r = 0; r < world_size_; ++r) inputs[static_cast<std::size_t>(r)] = slot(r, ticket);
        void* outputs[] = {output};
        reduce(request.dtype, request.op, span.count, inputs.data(), inputs.size(), outputs, 1);
      }
      break;
  }
}

}  // namespace ddpkit::shm
