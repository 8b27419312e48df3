#include "comm/shm/engine.h"

#include <unistd.h>

#include <cstring>

#include <ddpkit/error.h>

#include "comm/shm/operation.h"
#include "comm/timeout.h"

namespace ddpkit::shm {

Engine::Engine(Mapping control, int rank, std::vector<int> pids, std::chrono::milliseconds timeout, int first_rank)
    : rank_(rank),
      world_size_(static_cast<int>(pids.size())),
      timeout_(timeout),
      peers_(std::move(control), rank, std::move(pids), timeout, first_rank),
      mailbox_(rank, peers_.channels()) {
  staging_ = {.rank = rank, .slots = peers_.staging_slots(), .parts = {}};
  staging_.parts.resize(staging_.slots.size());
  Engines::all().add(this);
}

Engine::~Engine() {
  Engines::all().remove(this);
  {
    std::unique_lock lock(mutex_);
    settle(lock);
    stopping_ = true;
  }
  background_wanted_.notify_all();
  peers_.wake(rank_);
  if (background_thread_.get_id() == std::this_thread::get_id()) {
    // A callback held the last reference to the engine. The thread ends after the callback returns.
    *ended_by_callback_ = true;
    background_thread_.detach();
  } else if (background_thread_.joinable()) {
    background_thread_.join();
  }
  if (recorder_.is_world(group_number_)) recorder_.leave();
  peers_.leave();
  // No thread progresses these any more.
  const auto abandoned = std::make_exception_ptr(
      Error("the process group was released before the end of its collective; keep it until then"));
  for (const Background& entry : background_) {
    if (entry.then) entry.then(entry.pending->finished ? entry.pending->failure : abandoned);
  }
}

bool Engine::is_of_this_process() const noexcept { return ::getpid() == peers_.pid(rank_); }

OperationHandle Engine::begin(std::unique_lock<std::mutex>& lock, Request request) {
  throw_if_failed();
  if (world_size_ > kRanksOfAllCollectives) check_pieces(request.kind, world_size_);
  OperationHandle operation = new_operation();
  operation->request = std::move(request);
  enqueue(lock, operation);
  return operation;
}

PendingHandle Engine::post(Request request) {
  std::unique_lock lock(mutex_);
  OperationHandle operation = begin(lock, std::move(request));
  settle(lock);
  return operation;
}

void Engine::run(Request request) {
  std::unique_lock lock(mutex_);
  OperationHandle operation = begin(lock, std::move(request));
  settle(lock);
  if (!operation->finished) wait_until(lock, timeout_, nullptr, [&] { return operation->finished; });
  operation->throw_if_failed();
  if (spare_.size() < kMaxOutstanding) spare_.push_back(std::move(operation));
}

OperationHandle Engine::new_operation() {
  if (spare_.empty()) return std::make_shared<Operation>();
  OperationHandle operation = std::move(spare_.back());
  spare_.pop_back();
  // A small collective takes less time than allocating these vectors again.
  auto segments = std::move(operation->segments);
  auto parts = std::move(operation->parts);
  segments.clear();
  parts.clear();
  *operation = Operation();
  operation->segments = std::move(segments);
  operation->parts = std::move(parts);
  return operation;
}

void Engine::enqueue(std::unique_lock<std::mutex>& lock, const OperationHandle& operation) {
  const Request& request = operation->request;
  // The header of the collective kMaxOutstanding before is overwritten, so all ranks must have read it. While this
  // thread waits, another thread may post a collective, so the sequence number is read after the wait.
  const auto header_is_free = [&] {
    return next_sequence_ < kMaxOutstanding ||
           peers_.all_reached(&Progress::matched, next_sequence_ - kMaxOutstanding + 1);
  };
  if (world_size_ > 1 && !header_is_free()) wait_until(lock, timeout_, nullptr, header_is_free);
  const std::uint64_t sequence = next_sequence_;
  operation->header = {.sequence = sequence,
                       .numel = request.numel,
                       .kind = request.kind,
                       .dtype = static_cast<std::uint8_t>(request.dtype),
                       .reduce_op = static_cast<std::uint8_t>(request.op),
                       .root = request.root,
                       .pieces = static_cast<std::uint32_t>(request.pieces.size()),
                       .piece_sizes = 0,
                       .address = {}};
  for (const Piece& piece : request.pieces) {
    operation->header.piece_sizes = (operation->header.piece_sizes ^ piece.numel) * 0x100000001b3ULL;  // FNV-1
  }
  if (world_size_ == 1) {
    run_alone(operation);
    ++next_sequence_;
    return;
  }
  segments_.locate(*operation);
  peers_.own().headers[sequence % kMaxOutstanding].store(operation->header);
  operation->record =
      recorder_.start(static_cast<flight::Call>(request.kind), sequence, operation->bytes(), group_number_);
  operations_.push_back(operation);
  ++next_sequence_;
  peers_.publish(mine().posted, next_sequence_);
  progress();
}

void Engine::run_alone(const OperationHandle& operation) {
  Request& request = operation->request;
  const void* input = request.inputs.empty() ? request.input : request.inputs[0];
  void* output = request.outputs.empty() ? request.output : request.outputs[0];
  if (request.pieces.empty() && output && output != input) std::memcpy(output, input, operation->bytes());
  for (const Piece& piece : request.pieces) {
    if (piece.slice) std::memcpy(piece.slice, piece.data, piece.numel * operation->element_size());
  }
  complete(operation, request.on_finish, request.keep_alive);
}

std::shared_ptr<SymmetricSegment> Engine::allocate(std::size_t bytes, Mapping::Fill fill) {
  const auto gather = [&](const SegmentOffer& offer) {
    std::vector<SegmentOffer> offers(static_cast<std::size_t>(world_size_));
    Request request{.kind = CollectiveKind::kAllGather, .input = &offer, .numel = sizeof(SegmentOffer)};
    for (SegmentOffer& theirs : offers) request.outputs.push_back(&theirs);
    wait(post(std::move(request)));
    return offers;
  };
  const auto fail_as = [this](FailureKind kind, const Error& error) {
    const std::unique_lock lock(mutex_);
    fail(kind, error.what(), error.context().rank);
  };
  SegmentOffer own;
  auto segment = segments_.create(bytes, fill, own);
  const auto offers = gather(own);
  try {
    segments_.map(*segment, fill, offers, own);
  } catch (const CollectiveMismatch& error) {
    fail_as(FailureKind::kMismatch, error);
  } catch (const PeerLost& error) {
    fail_as(FailureKind::kPeerLost, error);
  }
  segments_.throw_first_error(gather(own));  // Also keeps the descriptor open until all ranks have mapped it.
  const std::unique_lock lock(mutex_);
  segments_.add(segment);
  return segment;
}

void Engine::settle(std::unique_lock<std::mutex>& lock) {
  while (!due_.empty()) {
    std::vector<Due> due;
    due.swap(due_);
    lock.unlock();
    for (Due& entry : due) {
      try {
        if (entry.on_finish) entry.on_finish();
      } catch (...) {
        entry.pending->failure = std::current_exception();
      }
      entry.keep_alive.reset();
    }
    lock.lock();
    for (const Due& entry : due) entry.pending->finished = true;
    peers_.wake(rank_);  // Another thread may wait for one of these operations.
    due.clear();
    if (due_.empty()) due_.swap(due);  // Keeps the memory for reuse.
  }
}

MessageHandle Engine::post(MessageHandle message) {
  std::unique_lock lock(mutex_);
  throw_if_failed();
  try {
    mailbox_.post(message);
  } catch (const CollectiveMismatch& error) {
    fail(FailureKind::kMismatch, error.what(), error.context().rank);
  }
  progress();
  settle(lock);
  return message;
}

void Engine::set_timeout(std::chrono::milliseconds timeout) noexcept {
  const std::lock_guard lock(mutex_);
  timeout_ = bounded(timeout);
}

std::uint64_t Engine::sequence() const noexcept {
  const std::lock_guard lock(mutex_);
  return next_sequence_;
}

}  // namespace ddpkit::shm
