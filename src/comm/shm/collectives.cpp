#include "comm/shm/collectives.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "comm/shm/diagnostics.h"

namespace ddpkit::shm {
namespace {

/// From this size, more than two ranks share the reduction of a staged chunk.
constexpr std::size_t kShareFrom = std::size_t{16} << 10;
/// Chunks that a rank copies in before it reduces. It copies the following chunks in while it reduces earlier ones.
constexpr std::uint64_t kAhead = kSlots / 2;

/// Returns whether `ticket` can be copied in while an earlier ticket is reduced.
bool can_copy_along(const Operation& operation, std::uint64_t ticket) {
  return operation.args.kind == CollectiveKind::kAllReduce && operation.path == Path::kStaged &&
         !operation.shared_reduce && ticket >= operation.first_ticket + kAhead &&
         ticket + 1 < operation.first_ticket + operation.tickets;  // The last chunk may be shorter.
}

}  // namespace

Collectives::Collectives(Peers& peers, const Segments& segments, std::vector<Due>& due, std::uint32_t group_number)
    : peers_(peers),
      own_(peers.own().progress),
      segments_(segments),
      due_(due),
      group_number_(group_number),
      staging_{.rank = peers.rank(), .slots = peers.staging_slots(), .parts = {}} {
  staging_.parts.resize(staging_.slots.size());
}

OperationHandle Collectives::prepare(CollectiveArgs&& args) {
  if (peers_.world_size() > kRanksOfAllCollectives) check_pieces(args.kind, peers_.world_size());
  const auto free =
      std::find_if(spare_.rbegin(), spare_.rend(), [](const auto& each) { return each.use_count() == 1; });
  if (free == spare_.rend()) {
    auto operation = std::make_shared<Operation>();
    operation->args = std::move(args);
    return operation;
  }
  std::swap(*free, spare_.back());
  OperationHandle operation = std::move(spare_.back());
  spare_.pop_back();
  // A small collective takes less time than making an Operation, or than allocating its vectors again. post(), locate()
  // and resolve() set all other members.
  static_cast<Pending&>(*operation) = Pending();
  operation->segments.clear();
  operation->parts.clear();
  operation->path = Path::kUnknown;
  operation->args = std::move(args);
  return operation;
}

bool Collectives::can_post() noexcept {
  if (next_sequence_ < least_matched_ + kMaxOutstanding || peers_.world_size() == 1) return true;
  least_matched_ = peers_.least(&Progress::matched);
  return next_sequence_ < least_matched_ + kMaxOutstanding;
}

void Collectives::post(const OperationHandle& operation) {
  const CollectiveArgs& args = operation->args;
  const std::uint64_t sequence = next_sequence_;
  operation->header = {.sequence = sequence,
                       .numel = args.numel,
                       .kind = args.kind,
                       .dtype = static_cast<std::uint8_t>(args.dtype),
                       .reduce_op = static_cast<std::uint8_t>(args.op),
                       .root = args.root,
                       .tensors = static_cast<std::uint32_t>(args.tensors.size()),
                       .tensor_sizes = 0,
                       .address = {}};
  for (const CoalescedTensor& tensor : args.tensors) {
    operation->header.tensor_sizes = (operation->header.tensor_sizes ^ tensor.numel) * 0x100000001b3ULL;  // FNV-1
  }
  if (peers_.world_size() == 1) {
    run_alone(operation);
    ++next_sequence_;
    return;
  }
  operation->call = operation->header.hash();
  segments_.locate(*operation);
  peers_.own().headers[sequence % kMaxOutstanding].store(operation->header);
  Event event{.kind = static_cast<EventKind>(args.kind),
              .group = group_number_,
              .sequence = sequence,
              .bytes = operation->bytes()};
  operation->event = args.recorded ? ring_.begin(event) : kNoEvent;
  operations_.push_back(operation);
  ++next_sequence_;
  peers_.publish(own_.posted, next_sequence_);
}

void Collectives::run_alone(const OperationHandle& operation) {
  CollectiveArgs& args = operation->args;
  const void* input = args.input_for(0);
  void* output = args.output_from(0);
  if (args.tensors.empty() && output && output != input) std::memcpy(output, input, operation->bytes());
  for (const CoalescedTensor& tensor : args.tensors) {
    const std::size_t size = operation->element_size();
    if (tensor.count != 0)
      std::memcpy(tensor.output, static_cast<const std::byte*>(tensor.data) + tensor.begin * size, tensor.count * size);
  }
  complete(operation, args.on_finish, args.keep_alive, due_);
}

bool Collectives::progress() {
  resolve();
  bool moved = arrive();  // First: the others may be waiting.
  moved |= match();
  moved |= reduce();
  moved |= finish();
  return moved;
}

void Collectives::drain(std::uint64_t end) {
  end_ = end;
  while (progress()) {
  }
}

bool Collectives::match() {
  bool moved = false;
  for (;;) {
    const std::uint64_t sequence = own_.matched.load(std::memory_order_relaxed);
    Operation* operation = at(sequence);
    if (sequence >= end_ || !operation) return moved;
    if (operation->path != Path::kUnknown) {
      if (!all_made(*operation)) return moved;
    } else {
      if (!peers_.all_reached(&Progress::posted, sequence + 1)) return moved;
      compare_headers(peers_, operation->header);
      segments_.agree(*operation);
      resolve();
    }
    // After every rank has matched, the headers may be overwritten.
    peers_.publish(own_.matched, sequence + 1);
    moved = true;
  }
}

/// Returns whether all ranks have arrived at the first ticket of a staged collective. Throws CollectiveMismatch if they
/// called different collectives.
bool Collectives::all_made(const Operation& operation) const {
  if (!all_arrived(operation, operation.first_ticket)) return false;
  bool same = true;
  for (int r = 0; r < peers_.world_size(); ++r)
    same = same && staging_.head(r, operation.first_ticket).call.load(std::memory_order_relaxed) == operation.call;
  if (!same) compare_headers(peers_, operation.header);
  return true;
}

/// Assigns tickets to collectives, in order, as soon as their number of tickets is known.
void Collectives::resolve() {
  for (; Operation* operation = at(resolved_); ++resolved_) {
    if (operation->path == Path::kUnknown) return;  // match() decides the path.
    const CollectiveKind kind = operation->args.kind;
    const bool symmetric = operation->path == Path::kSymmetric;
    const std::size_t piece = operation->largest_piece * operation->element_size();
    operation->layout = slot_layout(kind, peers_.world_size(), piece);
    const std::size_t step = operation->layout.piece_bytes;
    operation->tickets = symmetric || piece == 0 ? 1 : (piece + step - 1) / step;
    const bool reduces = kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce;
    operation->shared_reduce = symmetric || (reduces && peers_.world_size() > 2 && piece >= kShareFrom);
    operation->first_ticket = next_ticket_;
    next_ticket_ += operation->tickets;
  }
}

/// The previous user of the slot is `ticket` - kSlots.
bool Collectives::slot_is_free(std::uint64_t ticket) noexcept {
  if (ticket < least_finished_ + kSlots) return true;
  least_finished_ = peers_.least(&Progress::finished);
  return ticket < least_finished_ + kSlots;
}

bool Collectives::all_arrived(const Operation& operation, std::uint64_t ticket) const noexcept {
  if (operation.path == Path::kSymmetric) return peers_.all_reached(&Progress::arrived, ticket + 1);
  for (int r = 0; r < peers_.world_size(); ++r) {
    if (staging_.head(r, ticket).arrived.load(std::memory_order_acquire) <= ticket) return false;
  }
  return true;
}

/// Makes this rank's data of a ticket available to the others.
void Collectives::announce(const Operation& operation, std::uint64_t ticket) noexcept {
  if (operation.path == Path::kStaged) {
    SlotHead& head = staging_.head(peers_.rank(), ticket);
    head.call.store(operation.call, std::memory_order_relaxed);
    head.arrived.store(ticket + 1, std::memory_order_release);
  }
  peers_.publish(own_.arrived, ticket + 1);
}

bool Collectives::arrive() {
  bool moved = false;
  while (arrive_sequence_ < std::min(resolved_, end_)) {
    const Operation& operation = *at(arrive_sequence_);
    const std::uint64_t ticket = own_.arrived.load(std::memory_order_relaxed);
    if (operation.path == Path::kStaged) {
      if (!slot_is_free(ticket)) return moved;
      // finish() copies it.
      if (can_copy_along(operation, ticket) && ticket >= own_.finished.load(std::memory_order_relaxed) + kAhead)
        return moved;
      copy_in(staging_, operation, ticket);
    }
    announce(operation, ticket);
    if (ticket + 1 == operation.first_ticket + operation.tickets) ++arrive_sequence_;
    moved = true;
  }
  return moved;
}

bool Collectives::reduce() {
  bool moved = false;
  for (;;) {
    const std::uint64_t ticket = own_.reduced.load(std::memory_order_relaxed);
    if (ticket == own_.arrived.load(std::memory_order_relaxed) || reduce_sequence_ >= end_) return moved;
    const Operation& operation = *at(reduce_sequence_);
    if (own_.matched.load(std::memory_order_relaxed) <= reduce_sequence_ || !all_arrived(operation, ticket))
      return moved;
    if (operation.shared_reduce) {
      reduce_slice(staging_, operation, ticket);
      peers_.publish(own_.reduced, ticket + 1);
    } else {
      own_.reduced.store(ticket + 1, std::memory_order_release);  // No rank waits for it.
    }
    if (ticket + 1 == operation.first_ticket + operation.tickets) ++reduce_sequence_;
    moved = true;
  }
  return moved;
}

bool Collectives::finish() {
  bool moved = false;
  for (;;) {
    const std::uint64_t ticket = own_.finished.load(std::memory_order_relaxed);
    if (ticket == own_.reduced.load(std::memory_order_relaxed) || first_sequence_ >= end_) return moved;
    Operation& operation = *operations_[finished_];
    if (operation.shared_reduce && !peers_.all_reached(&Progress::reduced, ticket + 1)) return moved;
    const std::uint64_t next = own_.arrived.load(std::memory_order_relaxed);
    const bool along = can_copy_along(operation, next) && slot_is_free(next);
    if (operation.args.kind == CollectiveKind::kAllToAll && ticket == operation.first_ticket) {
      for (int r = 0; r < peers_.world_size(); ++r) compare_counts(peers_, operation, r, staging_.slot(r, ticket));
    }
    copy_out(staging_, operation, ticket, along ? std::optional(next) : std::nullopt);
    if (along) announce(operation, next);
    peers_.publish(own_.finished, ticket + 1);
    moved = true;
    if (ticket + 1 < operation.first_ticket + operation.tickets) continue;
    OperationHandle done = std::move(operations_[finished_++]);
    ++first_sequence_;
    if (finished_ == operations_.size() || finished_ == kMaxOutstanding) {
      operations_.erase(operations_.begin(), operations_.begin() + static_cast<std::ptrdiff_t>(finished_));
      finished_ = 0;
    }
    complete(done, done->args.on_finish, done->args.keep_alive, due_);
    done->segments.clear();
    ring_.finish(done->event);
    if (spare_.size() < kMaxOutstanding) spare_.push_back(std::move(done));
  }
}

}  // namespace ddpkit::shm
