// Errors of the engine: monitors peers, ends the group.
#include <signal.h>

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/shm/engine.h"
#include "comm/shm/operation.h"

namespace ddpkit::shm {
namespace {

std::exception_ptr make_error(FailureKind kind, const std::string& text, Error::Context context) {
  switch (kind) {
    case FailureKind::kMismatch:
      return std::make_exception_ptr(CollectiveMismatch(text, std::move(context)));
    case FailureKind::kTimeout:
      return std::make_exception_ptr(Timeout(text, std::move(context)));
    default:
      return std::make_exception_ptr(PeerLost(text, std::move(context)));
  }
}

}  // namespace

int Engine::ended_peers() const noexcept {
  int ended = 0;
  for (int r = 0; r < world_size_; ++r) ended += block(r).failure.load() != 0 || block(r).left.load() != 0 ? 1 : 0;
  return ended;
}

void Engine::throw_announced_failure(int rank) const {
  if (const auto failure = announced_failure(rank))
    std::rethrow_exception(make_error(failure->kind, failure->text, {.rank = failure->culprit, .call = "rendezvous"}));
}

void Engine::check_peers(const Message* message) {
  const auto fail_as_announced = [&](int r) {
    if (const auto failure = announced_failure(r)) fail(failure->kind, failure->text, failure->culprit);
  };
  for (int r = 0; r < world_size_; ++r) {
    if (r != rank_) fail_as_announced(r);
  }
  const auto gone = [&](int r) { return block(r).left.load() != 0 || !watches_[static_cast<std::size_t>(r)].alive(); };
  std::vector<int> dead;
  for (int r = 0; r < world_size_; ++r) {
    if (r != rank_ && gone(r)) dead.push_back(r);
  }
  if (dead.empty()) return;
  // A rank that ended because of another rank's failure has announced that failure before.
  for (const int r : dead) fail_as_announced(r);
  // The operations that the rank completed before its end count, and may be enough.
  progress();
  const auto missing = missing_ranks(peers_, awaited(message));
  // Any remaining rank may still send the message.
  if (message && message->peer == kAnySource && dead.size() < missing.size()) return;
  if (message && message->over) return;
  for (const int r : dead) {
    if (std::find(missing.begin(), missing.end(), r) == missing.end()) continue;
    fail(FailureKind::kPeerLost, lost_text(peers_, awaited(message), r), named(r));
  }
}

void Engine::throw_timeout(const Message* message, std::chrono::milliseconds waited,
                           std::chrono::milliseconds timeout) {
  const auto missing = missing_ranks(peers_, awaited(message));
  for (const int r : missing) {
    // If a launcher reads the recorder, it requests the stacks. Otherwise the silent rank prints its stack to stderr.
    if (const int signal = block(r).stack_signal; signal != 0 && !recorder_.is_read()) ::kill(pid(r), signal);
  }
  fail(FailureKind::kTimeout, timeout_text(peers_, awaited(message), missing, waited, timeout),
       missing.empty() ? std::nullopt : std::optional(named(missing.front())));
}

void Engine::fail(FailureKind kind, const std::string& text, std::optional<int> culprit) {
  Error::Context context{.rank = culprit, .call = "collective", .sequence = first_sequence_};
  if (!operations_.empty()) context.call = name_of(operations_.front()->header.kind);
  failure_ = make_error(kind, text, std::move(context));
  announce(kind, text, culprit);
  // The launcher only knows ranks of the world group.
  recorder_.fail(static_cast<flight::Failure>(kind), recorder_.is_world(group_number_) ? culprit : std::nullopt);
  std::rethrow_exception(failure_);
}

void Engine::announce(FailureKind kind, const std::string& text, std::optional<int> culprit) noexcept {
  RankBlock& self = block(rank_);
  if (self.failure.load() != 0) return;
  const std::size_t length = std::min(text.size(), self.failure_text.size() - 1);
  std::memcpy(self.failure_text.data(), text.data(), length);
  self.culprit = culprit.value_or(-1);
  self.failure.store(static_cast<std::uint32_t>(kind));
  ring_sleepers();
}

std::optional<Engine::AnnouncedFailure> Engine::announced_failure(int rank) const {
  const RankBlock& theirs = block(rank);
  const auto kind = static_cast<FailureKind>(theirs.failure.load());
  if (kind == FailureKind::kNone) return std::nullopt;
  const std::string text(theirs.failure_text.data(), strnlen(theirs.failure_text.data(), theirs.failure_text.size()));
  // Only the rank that aborts announces kAborted.
  if (kind == FailureKind::kAborted)
    return AnnouncedFailure{FailureKind::kPeerLost, fmt::format("rank {} aborted: {}", named(rank), text), named(rank)};
  return AnnouncedFailure{kind, text, theirs.culprit >= 0 ? std::optional<int>(theirs.culprit) : std::nullopt};
}

void Engine::abort(const std::string& reason) noexcept {
  const std::unique_lock lock(mutex_);
  if (failure_) return;
  announce(FailureKind::kAborted, reason, named(rank_));
  try {
    fail(FailureKind::kAborted, fmt::format("rank {} aborted: {}", named(rank_), reason), named(rank_));
  } catch (...) {
    // Later calls of this rank throw it.
  }
}

void Engine::throw_if_failed() const {
  if (failure_) std::rethrow_exception(failure_);
}

}  // namespace ddpkit::shm
