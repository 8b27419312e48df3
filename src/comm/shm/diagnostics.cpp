#include "comm/shm/diagnostics.h"

#include <cstring>
#include <map>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

namespace ddpkit::shm {
namespace {

constexpr const char* kReductionNames[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};

std::string ranks_text(const Peers& peers, const std::vector<int>& ranks) {
  std::vector<int> names;
  for (const int r : ranks) names.push_back(peers.named(r));
  return fmt::format("rank{} {}", names.size() == 1 ? "" : "s", fmt::join(names, ", "));
}

/// Returns text such as "all_reduce(sum) of 100 float32".
std::string describe(const Peers& peers, const CollectiveHeader& header) {
  const char* name = name_of(header.kind);
  const std::string data = fmt::format("{} {}", header.numel, name_of(static_cast<DataType>(header.dtype)));
  const char* reduction = kReductionNames[header.reduce_op & 7];
  const int root = peers.named(header.root);
  switch (header.kind) {
    case CollectiveKind::kBarrier:
      return name;
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduceScatter:
      return fmt::format("{}({}) of {}", name, reduction, data);
    case CollectiveKind::kAllReduceCoalesced:
    case CollectiveKind::kReduceScatterCoalesced:
      return fmt::format("{}({}) of {} in {} tensors (sizes {:x})", name, reduction, data, header.tensors,
                         header.tensor_sizes);
    case CollectiveKind::kReduce:
      return fmt::format("{}({}) of {} to rank {}", name, reduction, data, root);
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kScatter:
      return fmt::format("{} of {} from rank {}", name, data, root);
    case CollectiveKind::kGather:
      return fmt::format("{} of {} to rank {}", name, data, root);
    case CollectiveKind::kAllGather:
      return fmt::format("{} of {}", name, data);
    case CollectiveKind::kAllToAll:
      return fmt::format("{} of at most {} per rank", name, data);
  }
  return name;
}

std::string describe(const Peers& peers, const Awaited& awaited) {
  if (awaited.message) return describe(*awaited.message);
  if (!awaited.oldest) return "a collective";
  const CollectiveHeader& header = awaited.oldest->header;
  return fmt::format("{} (number {})", describe(peers, header), header.sequence);
}

std::string last_call(const Peers& peers, int rank) {
  const std::optional<CollectiveHeader> header = last_header(peers.block(rank));
  if (!header) return "has made no call yet";
  return fmt::format("last called {} (number {})", describe(peers, *header), header->sequence);
}

}  // namespace

const char* name_of(CollectiveKind kind) {
  // Other processes write the kind, so it may be invalid.
  return kind > CollectiveKind::kReduceScatterCoalesced ? "?" : name_of(static_cast<EventKind>(kind));
}

void check_pieces(CollectiveKind kind, int world_size) {
  if (slot_layout(kind, world_size, 1).piece_bytes != 0) return;
  int most = kRanksOfAllCollectives;
  while (slot_layout(kind, most + 1, 1).piece_bytes != 0) ++most;
  throw InvalidArgument(fmt::format("{}: the shm backend serves at most {} ranks, not {}; use the gloo backend",
                                    name_of(kind), most, world_size));
}

void compare_headers(const Peers& peers, const CollectiveHeader& own) {
  const auto header_of = [&](int rank) { return peers.block(rank).headers[own.sequence % kMaxOutstanding].load(); };
  const auto same = [](const CollectiveHeader& a, const CollectiveHeader& b) {
    const bool same_size = a.numel == b.numel || a.kind == CollectiveKind::kAllToAll;
    return a.sequence == b.sequence && same_size && a.kind == b.kind && a.dtype == b.dtype &&
           a.reduce_op == b.reduce_op && a.root == b.root && a.tensors == b.tensors && a.tensor_sizes == b.tensor_sizes;
  };
  bool agree = true;
  for (int r = 0; r < peers.world_size(); ++r) agree = agree && same(header_of(r), own);
  if (agree) return;
  std::map<std::string, std::vector<int>> callers;
  for (int r = 0; r < peers.world_size(); ++r) callers[describe(peers, header_of(r))].push_back(r);
  std::vector<std::string> parts;
  const std::vector<int>* fewest = nullptr;
  for (const auto& [call, ranks] : callers) {
    parts.push_back(fmt::format("{} called {}", ranks_text(peers, ranks), call));
    if (!fewest || ranks.size() < fewest->size()) fewest = &ranks;
  }
  throw CollectiveMismatch(
      fmt::format("the ranks' collectives number {} do not match: {}", own.sequence, fmt::join(parts, "; ")),
      {.rank = peers.named(fewest->front())});
}

void compare_counts(const Peers& peers, const Operation& operation, int rank, const std::byte* slot) {
  std::uint64_t sent = 0;
  std::memcpy(&sent, slot + static_cast<std::size_t>(peers.rank()) * sizeof sent, sizeof sent);
  const std::size_t expected = operation.args.receive_numel[static_cast<std::size_t>(rank)];
  if (sent == expected) return;
  throw CollectiveMismatch(
      fmt::format("all_to_all (number {}): rank {} sends {} elements to rank {}, which expects {}",
                  operation.header.sequence, peers.named(rank), sent, peers.named(peers.rank()), expected),
      {.rank = peers.named(rank)});
}

std::vector<int> missing_ranks(const Peers& peers, const Awaited& awaited) {
  std::vector<int> missing;
  if (const Message* message = awaited.message) {
    for (int r = 0; r < peers.world_size(); ++r) {
      if (r != peers.rank() && (message->peer == kAnySource || message->peer == r)) missing.push_back(r);
    }
    return missing;
  }
  if (!awaited.oldest) return missing;
  const auto below = [&](std::atomic<std::uint64_t> Progress::*count, std::uint64_t needed) {
    for (int r = 0; r < peers.world_size(); ++r) {
      if (r != peers.rank() && (peers.block(r).progress.*count).load() < needed) missing.push_back(r);
    }
    return !missing.empty();
  };
  // In the order in which the oldest collective depends on its peers.
  const std::uint64_t sequence = awaited.oldest->header.sequence;
  const Progress& own = peers.block(peers.rank()).progress;
  if (below(&Progress::posted, sequence + 1)) return missing;
  if (awaited.oldest->path == Path::kUnknown && below(&Progress::matched, sequence + 1)) return missing;
  const std::uint64_t ticket = own.finished.load();
  if (own.arrived.load() <= ticket && ticket >= kSlots && below(&Progress::finished, ticket - kSlots + 1))
    return missing;
  if (below(&Progress::arrived, ticket + 1)) return missing;
  if (below(&Progress::matched, sequence + 1)) return missing;
  below(&Progress::reduced, ticket + 1);
  return missing;
}

const char* end_of(const Peers& peers, int rank) {
  return peers.block(rank).left.load() ? "has left the group" : "has ended";
}

std::string lost_text(const Peers& peers, const Awaited& awaited, int lost) {
  return fmt::format("rank {} (pid {}) {} while rank {} waited for it in {}; it {}", peers.named(lost), peers.pid(lost),
                     end_of(peers, lost), peers.named(peers.rank()), describe(peers, awaited), last_call(peers, lost));
}

std::string timeout_text(const Peers& peers, const Awaited& awaited, const std::vector<int>& missing,
                         std::chrono::milliseconds waited, std::chrono::milliseconds timeout) {
  std::vector<std::string> states;
  for (const int r : missing)
    states.push_back(fmt::format("rank {} (pid {}) {}", peers.named(r), peers.pid(r), last_call(peers, r)));
  const int rank = peers.named(peers.rank());
  std::string text = fmt::format("rank {} timed out after {:.1f} s in {}, waiting for {}: {}", rank,
                                 std::chrono::duration<double>(waited).count(), describe(peers, awaited),
                                 ranks_text(peers, missing), fmt::join(states, "; "));
  const CollectiveArgs* args = awaited.message || !awaited.oldest ? nullptr : &awaited.oldest->args;
  if (!args || !args->monitored || missing.empty()) return text;
  std::string late = ranks_text(peers, args->names_all ? missing : std::vector<int>{missing.front()});
  late.front() = 'R';
  return fmt::format("[Rank {}]: {} failed to pass monitoredBarrier in {} ms: {}", rank, late, timeout.count(), text);
}

}  // namespace ddpkit::shm
