// Errors of the engine: monitors peers, ends the group.
#include <algorithm>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/shm/engine.h"
#include "comm/shm/operation.h"

namespace ddpkit::shm {

void Engine::check_peers(const Message* message) {
  const auto fail_as_published = [&](int r) {
    if (const auto failure = peers_.failure_of(r)) fail(failure->kind, failure->text, failure->culprit);
  };
  for (int r = 0; r < world_size_; ++r) {
    if (r != rank_) fail_as_published(r);
  }
  const std::vector<int> lost = peers_.lost();
  if (lost.empty()) return;
  // A rank that ended because of another rank's failure has published that failure before.
  for (const int r : lost) fail_as_published(r);
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

void Engine::fail(FailureKind kind, const std::string& text, std::optional<int> culprit) {
  Error::Context context{.rank = culprit, .call = "collective", .sequence = first_sequence_};
  if (!operations_.empty()) context.call = name_of(operations_.front()->header.kind);
  failure_ = make_error(kind, text, std::move(context));
  peers_.publish_failure(kind, text, culprit);
  // The launcher only knows ranks of the world group.
  recorder_.fail(static_cast<flight::Failure>(kind), recorder_.is_world(group_number_) ? culprit : std::nullopt);
  std::rethrow_exception(failure_);
}

void Engine::abort(const std::string& reason) noexcept {
  const std::unique_lock lock(mutex_);
  if (failure_) return;
  peers_.publish_failure(FailureKind::kAborted, reason, peers_.named(rank_));
  try {
    fail(FailureKind::kAborted, fmt::format("rank {} aborted: {}", peers_.named(rank_), reason), peers_.named(rank_));
  } catch (...) {
    // Later calls of this rank throw it.
  }
}

void Engine::throw_if_failed() const {
  if (failure_) std::rethrow_exception(failure_);
}

}  // namespace ddpkit::shm
