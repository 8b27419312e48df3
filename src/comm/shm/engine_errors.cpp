// Errors of the engine: compares calls, monitors peers, ends the group.
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "comm/shm/engine.h"
#include "comm/shm/operation.h"
#include "comm/trace/page.h"

namespace ddpkit::shm {
namespace {

constexpr const char* kReductionNames[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};

std::string ranks_text(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

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

const char* name_of(CollectiveKind kind) {
  static_assert(static_cast<int>(CollectiveKind::kReduceScatterCoalesced) ==
                static_cast<int>(flight::Call::kReduceScatterCoalesced));
  // Other processes write the kind, so it may be invalid.
  return kind > CollectiveKind::kReduceScatterCoalesced ? "?" : flight::name_of(static_cast<flight::Call>(kind));
}

void check_pieces(CollectiveKind kind, int world_size) {
  if (slot_layout(kind, world_size).piece_bytes != 0) return;
  int most = kRanksOfAllCollectives;
  while (slot_layout(kind, most + 1).piece_bytes != 0) ++most;
  throw InvalidArgument(fmt::format("{}: the shm backend serves at most {} ranks, not {}; use the gloo backend",
                                    name_of(kind), most, world_size));
}

std::string Engine::named(const std::vector<int>& ranks) const {
  std::vector<int> names;
  for (const int r : ranks) names.push_back(named(r));
  return ranks_text(names);
}

std::string Engine::describe_call(const CollectiveHeader& header) const {
  CollectiveHeader shown = header;
  shown.root = named(header.root);
  return describe(shown);
}

std::string describe(const CollectiveHeader& header) {
  const char* name = name_of(header.kind);
  const std::string data = fmt::format("{} {}", header.numel, name_of(static_cast<DataType>(header.dtype)));
  const char* reduction = kReductionNames[header.reduce_op & 7];
  switch (header.kind) {
    case CollectiveKind::kBarrier:
      return name;
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduceScatter:
      return fmt::format("{}({}) of {}", name, reduction, data);
    case CollectiveKind::kAllReduceCoalesced:
    case CollectiveKind::kReduceScatterCoalesced:
      return fmt::format("{}({}) of {} in {} tensors (sizes {:x})", name, reduction, data, header.pieces,
                         header.piece_sizes);
    case CollectiveKind::kReduce:
      return fmt::format("{}({}) of {} to rank {}", name, reduction, data, header.root);
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kScatter:
      return fmt::format("{} of {} from rank {}", name, data, header.root);
    case CollectiveKind::kGather:
      return fmt::format("{} of {} to rank {}", name, data, header.root);
    case CollectiveKind::kAllGather:
      return fmt::format("{} of {}", name, data);
    case CollectiveKind::kAllToAll:
      return fmt::format("{} of at most {} per rank", name, data);
  }
  return name;
}

void Engine::compare_headers(const Operation& operation) {
  const std::uint64_t sequence = operation.header.sequence;
  const auto same = [](const CollectiveHeader& a, const CollectiveHeader& b) {
    const bool same_size = a.numel == b.numel || a.kind == CollectiveKind::kAllToAll;
    return a.sequence == b.sequence && same_size && a.kind == b.kind && a.dtype == b.dtype &&
           a.reduce_op == b.reduce_op && a.root == b.root && a.pieces == b.pieces && a.piece_sizes == b.piece_sizes;
  };
  bool agree = true;
  for (int r = 0; r < world_size_; ++r)
    agree = agree && same(block(r).headers[sequence % kMaxOutstanding].load(), operation.header);
  if (agree) return;
  std::map<std::string, std::vector<int>> callers;
  for (int r = 0; r < world_size_; ++r)
    callers[describe_call(block(r).headers[sequence % kMaxOutstanding].load())].push_back(r);
  std::vector<std::string> parts;
  const std::vector<int>* fewest = nullptr;
  for (const auto& [call, ranks] : callers) {
    parts.push_back(fmt::format("{} called {}", named(ranks), call));
    if (!fewest || ranks.size() < fewest->size()) fewest = &ranks;
  }
  fail(FailureKind::kMismatch,
       fmt::format("the ranks' collectives number {} do not match: {}", sequence, fmt::join(parts, "; ")),
       named(fewest->front()));
}

void Engine::compare_counts(const Operation& operation, int rank, const std::byte* slot) {
  std::uint64_t sent = 0;
  std::memcpy(&sent, slot + static_cast<std::size_t>(rank_) * sizeof sent, sizeof sent);
  const std::size_t expected = operation.request.receive_numel[static_cast<std::size_t>(rank)];
  if (sent == expected) return;
  fail(FailureKind::kMismatch,
       fmt::format("all_to_all (number {}): rank {} sends {} elements to rank {}, which expects {}",
                   operation.header.sequence, named(rank), sent, named(rank_), expected),
       named(rank));
}

std::vector<int> Engine::missing_ranks(const Message* message) const {
  std::vector<int> missing;
  if (message) {
    for (int r = 0; r < world_size_; ++r) {
      if (r != rank_ && (message->peer == kAnySource || message->peer == r)) missing.push_back(r);
    }
    return missing;
  }
  if (operations_.empty()) return missing;
  const auto below = [&](std::atomic<std::uint64_t> Progress::*count, std::uint64_t needed) {
    for (int r = 0; r < world_size_; ++r) {
      if (r != rank_ && (block(r).progress.*count).load() < needed) missing.push_back(r);
    }
    return !missing.empty();
  };
  // In the order in which the oldest collective depends on its peers.
  if (below(&Progress::posted, first_sequence_ + 1)) return missing;
  if (below(&Progress::matched, first_sequence_ + 1)) return missing;
  const std::uint64_t ticket = mine().finished.load();
  if (mine().arrived.load() <= ticket && ticket >= kSlots && below(&Progress::finished, ticket - kSlots + 1))
    return missing;
  if (below(&Progress::arrived, ticket + 1)) return missing;
  below(&Progress::reduced, ticket + 1);
  return missing;
}

std::string Engine::last_call(int rank) const {
  const std::optional<CollectiveHeader> header = last_header(block(rank));
  if (!header) return "has made no call yet";
  return fmt::format("last called {} (number {})", describe_call(*header), header->sequence);
}

std::string Engine::current_call(const Message* message) const {
  if (message) return describe(*message);
  return operations_.empty()
             ? "a collective"
             : fmt::format("{} (number {})", describe_call(operations_.front()->header), first_sequence_);
}

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
  const auto missing = missing_ranks(message);
  // Any remaining rank may still send the message.
  if (message && message->peer == kAnySource && dead.size() < missing.size()) return;
  if (message && message->over) return;
  for (const int r : dead) {
    if (std::find(missing.begin(), missing.end(), r) == missing.end()) continue;
    fail(FailureKind::kPeerLost,
         fmt::format("rank {} (pid {}) {} while rank {} waited for it in {}; it {}", named(r), pid(r),
                     block(r).left.load() ? "has left the group" : "has ended", named(rank_), current_call(message),
                     last_call(r)),
         named(r));
  }
}

void Engine::throw_timeout(const Message* message, std::chrono::milliseconds waited,
                           std::chrono::milliseconds timeout) {
  const auto missing = missing_ranks(message);
  std::vector<std::string> states;
  for (const int r : missing) {
    // If a launcher reads the recorder, it requests the stacks. Otherwise the silent rank prints its stack to stderr.
    if (const int signal = block(r).stack_signal; signal != 0 && !recorder_.is_read()) ::kill(pid(r), signal);
  }
  for (const int r : missing) states.push_back(fmt::format("rank {} (pid {}) {}", named(r), pid(r), last_call(r)));
  std::string text = fmt::format("rank {} timed out after {:.1f} s in {}, waiting for {}: {}", named(rank_),
                                 std::chrono::duration<double>(waited).count(), current_call(message), named(missing),
                                 fmt::join(states, "; "));
  if (const Request* request = message || operations_.empty() ? nullptr : &operations_.front()->request;
      request && request->monitored && !missing.empty()) {
    std::string late = named(request->names_all ? missing : std::vector<int>{missing.front()});
    late.front() = 'R';
    text = fmt::format("[Rank {}]: {} failed to pass monitoredBarrier in {} ms: {}", named(rank_), late,
                       timeout.count(), text);
  }
  fail(FailureKind::kTimeout, text, missing.empty() ? std::nullopt : std::optional(named(missing.front())));
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
