#include "comm/shm/engine.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/shm/shrink.h"
#include "comm/timeout.h"

namespace ddpkit::shm {

namespace {

std::vector<int> names_or_ranks(std::vector<int> names, std::size_t ranks) {
  if (!names.empty()) return names;
  names.resize(ranks);
  std::iota(names.begin(), names.end(), 0);
  return names;
}

}  // namespace

Engine::Engine(Mapping control, int rank, std::vector<int> pids, std::chrono::milliseconds timeout,
               std::vector<int> names)
    : timeout_(timeout),
      peers_(std::move(control), rank, pids, timeout, names_or_ranks(std::move(names), pids.size())) {
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
  peers_.wake(rank());
  if (background_thread_.get_id() == std::this_thread::get_id()) {
    // A callback held the last reference to the engine. The thread ends after the callback returns.
    *ended_by_callback_ = true;
    background_thread_.detach();
  } else if (background_thread_.joinable()) {
    background_thread_.join();
  }
  if (ring_.is_world(group_number_)) ring_.leave();
  peers_.leave(first_unfinished());
  // No thread progresses these any more.
  const auto abandoned = std::make_exception_ptr(
      Error("the process group was released before the end of its collective; keep it until then"));
  for (const Background& entry : background_) {
    if (entry.then) entry.then(entry.pending->finished ? entry.pending->failure : abandoned);
  }
}

std::shared_ptr<Engine> share(std::unique_ptr<Engine> engine) {
  return {engine.release(), [](Engine* made) {
            if (made->is_of_this_process()) delete made;
          }};
}

bool Engine::is_of_this_process() const noexcept { return ::getpid() == peers_.pid(rank()); }

OperationHandle Engine::begin(std::unique_lock<std::mutex>& lock, CollectiveArgs&& args) {
  throw_if_failed();
  // A rank does not start a collective in which another rank has failed. The others may have completed earlier ones.
  if (peers_.any_failed()) fail_as_published(collectives_.next_sequence());
  // can_post() may read the peers' counts, so it follows: a read while they finish the previous collective slows them.
  OperationHandle operation = collectives_.prepare(std::move(args));
  const auto can_post = [&] { return collectives_.can_post(); };
  if (!can_post()) {
    wait_until(lock, timeout_, nullptr, can_post);
    throw_if_failed();
  }
  collectives_.post(operation);
  progress();
  return operation;
}

PendingHandle Engine::post(CollectiveArgs args) {
  std::unique_lock lock(mutex_);
  OperationHandle operation = begin(lock, std::move(args));
  settle(lock);
  return operation;
}

void Engine::run(CollectiveArgs args) {
  std::unique_lock lock(mutex_);
  OperationHandle operation = begin(lock, std::move(args));
  settle(lock);
  if (!operation->finished) wait_until(lock, timeout_, nullptr, [&] { return operation->finished; });
  operation->throw_if_failed();
}

std::shared_ptr<SymmetricSegment> Engine::allocate(std::size_t bytes, Mapping::Populate populate, Mapping pages) {
  const auto gather = [&](const SegmentOffer& offer) {
    std::vector<SegmentOffer> offers(static_cast<std::size_t>(world_size()));
    wait(post(
        {.kind = CollectiveKind::kAllGather, .input = &offer, .output = offers.data(), .numel = sizeof(SegmentOffer)}));
    return offers;
  };
  const auto fail_as = [this](FailureKind kind, const Error& error) {
    const std::unique_lock lock(mutex_);
    fail(kind, error.what(), error.context().rank);
  };
  SegmentOffer own;
  auto segment = segments_.create(bytes, populate, std::move(pages), own);
  const auto offers = gather(own);
  try {
    segments_.map(*segment, populate, offers, own);
  } catch (const CollectiveMismatch& error) {
    fail_as(FailureKind::kMismatch, error);
  } catch (const PeerLost& error) {
    fail_as(FailureKind::kPeerLost, error);
  }
  segments_.throw_first_error(gather(own));  // Also keeps the descriptor open until all ranks have mapped it.
  // A later elastic group may get the pages of an arena.
  const bool reusable = elastic_ && populate == Mapping::Populate::kLazy;
  if (!reusable) segment->mappings[static_cast<std::size_t>(rank())].close_descriptor();
  const std::unique_lock lock(mutex_);
  segments_.add(segment);
  return segment;
}

bool Engine::progress() {
  bool moved = false;
  try {
    for (bool again = true; again; moved |= again) {
      again = collectives_.progress();
      if (!mailbox_.idle()) again |= mailbox_.progress();
    }
  } catch (const CollectiveMismatch& error) {
    fail(FailureKind::kMismatch, error.what(), error.context().rank);
  }
  peers_.notify_sleepers();
  // The background thread sleeps on this rank's wake-ups.
  if (moved && !background_.empty()) peers_.wake(rank());
  return moved;
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
    peers_.wake(rank());  // Another thread may wait for one of these operations.
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

void Engine::fail_as_published(std::uint64_t sequence) {
  for (int r = 0; r < world_size(); ++r) {
    if (r == rank()) continue;
    const auto failure = peers_.failure_of(r);
    if (failure && failure->sequence <= sequence) fail(failure->kind, failure->text, failure->failed_rank);
  }
}

void Engine::check_peers(std::unique_lock<std::mutex>& lock, const Message* message,
                         const std::function<bool()>& done) {
  try {
    fail_if_lost(message);
  } catch (const PeerLost&) {
    settle(lock);
    if (!done()) throw;  // drain() may have completed it.
  }
  settle(lock);
}

void Engine::fail_if_lost(const Message* message) {
  fail_as_published();
  const std::vector<int> lost = peers_.lost();
  if (lost.empty()) return;
  // A rank that ended because of another rank's failure has published that failure before.
  fail_as_published();
  // The operations that the rank completed before its end count, and may be enough.
  progress();
  const auto missing = missing_ranks(peers_, awaited(message));
  // Any remaining rank may still send the message.
  if (message && message->peer == kAnySource && lost.size() < missing.size()) return;
  if (message && message->over) return;
  for (const int r : lost) {
    if (std::find(missing.begin(), missing.end(), r) == missing.end()) continue;
    fail(FailureKind::kPeerLost, lost_text(peers_, awaited(message), r), peers_.named(r));
  }
}

void Engine::throw_timeout(const Message* message, std::chrono::milliseconds waited,
                           std::chrono::milliseconds timeout) {
  const auto missing = missing_ranks(peers_, awaited(message));
  for (const int r : missing) peers_.request_stack(r);
  fail(FailureKind::kTimeout, timeout_text(peers_, awaited(message), missing, waited, timeout),
       missing.empty() ? std::nullopt : std::optional(peers_.named(missing.front())));
}

void Engine::fail(FailureKind kind, const std::string& text, std::optional<int> failed_rank) {
  Error::Context context{.rank = failed_rank, .call = "collective", .sequence = first_unfinished()};
  if (const Operation* oldest = collectives_.oldest()) context.call = name_of(oldest->header.kind);
  failure_ = make_error(kind, text, std::move(context));
  peers_.publish_failure(kind, text, failed_rank, first_unfinished());
  if (on_failure_) on_failure_(kind, text, failed_rank);
  // The launcher only knows ranks of groups of all ranks, as elastic groups are.
  ring_.fail(kind, elastic_ || ring_.is_world(group_number_) ? failed_rank : std::nullopt);
  if (elastic_ && kind == FailureKind::kPeerLost) drain();
  std::rethrow_exception(failure_);
}

/// A rank that has published its failure makes no progress until all others have failed or ended. From then on the
/// counts and the data of all ranks stay, so each rank can complete what one of them has completed.
void Engine::drain() {
  const auto deadline = Clock::now() + timeout_;
  std::uint64_t end = first_unfinished();
  for (int r = 0; r < world_size(); ++r) {
    const auto has_stopped = [&] { return peers_.block(r).failure.load() != 0 || peers_.has_ended(r); };
    if (r == rank() || !poll_until(deadline, has_stopped)) continue;  // After the deadline, shrink() names the rank.
    end = std::max(end, peers_.completed_by(r));
  }
  try {
    collectives_.drain(end);
  } catch (const CollectiveMismatch&) {
    // Of a later collective, which fails anyway.
  }
  peers_.notify_sleepers();
}

std::unique_ptr<Engine> Engine::shrink(int min_ranks, std::vector<int>& members) {
  if (!elastic_) throw InvalidArgument("shrink: the group was created without InitOptions::elastic");
  // Ranks that failed in another way do not come.
  if (peers_.own().failure.load() != static_cast<std::uint32_t>(FailureKind::kPeerLost))
    throw InvalidArgument("shrink: the group has not lost another rank");
  std::unique_ptr<Engine> engine;
  shm::shrink(peers_, min_ranks, timeout_, [&](SmallerGroup group, std::chrono::milliseconds timeout) {
    members = std::move(group.members);
    engine = std::make_unique<Engine>(std::move(group.control), group.rank, std::move(group.pids), timeout,
                                      std::move(group.names));
  });
  engine->set_timeout(timeout_);
  engine->set_elastic();
  engine->follow(*this);
  return engine;
}

void Engine::abort(const std::string& reason) noexcept {
  const std::unique_lock lock(mutex_);
  if (failure_) return;
  peers_.publish_failure(FailureKind::kAborted, reason, peers_.named(rank()), first_unfinished());
  try {
    fail(FailureKind::kAborted, fmt::format("rank {} aborted: {}", peers_.named(rank()), reason), peers_.named(rank()));
  } catch (...) {
    // Later calls of this rank throw it.
  }
}

void Engine::stop(FailureKind kind, const std::string& text, std::optional<int> failed_rank) {
  const std::unique_lock lock(mutex_);
  throw_if_failed();
  fail(kind, text, failed_rank);
}

void Engine::set_elastic(OnFailure on_failure) {
  const std::lock_guard lock(mutex_);
  elastic_ = true;
  on_failure_ = std::move(on_failure);
}

void Engine::check() const {
  const std::lock_guard lock(mutex_);
  throw_if_failed();
}

void Engine::check_ranks() {
  const std::unique_lock lock(mutex_);
  throw_if_failed();
  fail_as_published();
  for (const int r : peers_.lost())
    fail(FailureKind::kPeerLost, fmt::format("rank {} (pid {}) {}", peers_.named(r), peers_.pid(r), end_of(peers_, r)),
         peers_.named(r));
}

std::string Engine::end(std::chrono::milliseconds limit, const char* text) {
  try {
    set_timeout(limit);
    run({.kind = CollectiveKind::kBarrier});
  } catch (const std::exception& error) {
    return error.what();
  }
  const std::lock_guard lock(mutex_);
  failure_ = std::make_exception_ptr(Error(text));
  if (ring_.is_world(group_number_)) ring_.leave();
  return {};
}

void Engine::throw_if_failed() const {
  if (failure_) std::rethrow_exception(failure_);
}

void Engine::set_timeout(std::chrono::milliseconds timeout) noexcept {
  const std::lock_guard lock(mutex_);
  timeout_ = clamp_timeout(timeout);
}

std::chrono::milliseconds Engine::timeout() const noexcept {
  const std::lock_guard lock(mutex_);
  return timeout_;
}

std::uint64_t Engine::sequence() const noexcept {
  const std::lock_guard lock(mutex_);
  return collectives_.next_sequence();
}

}  // namespace ddpkit::shm
