#include "launch/blame.h"

#include <utility>

namespace ddpkit::launch {
namespace {

using flight::Failure;

bool lost_another(const Evidence& rank) {
  return rank.failure == Failure::kPeerLost || rank.failure == Failure::kTimeout;
}

std::vector<std::size_t> blamed_by(std::size_t rank, const std::vector<Evidence>& ranks,
                                   const std::vector<std::size_t>& ended) {
  const std::optional<std::size_t> culprit = ranks[rank].culprit;
  // After a timeout, the blamed rank is silent but has not failed.
  if (culprit && ranks[rank].failure == Failure::kTimeout) return {};
  if (culprit && *culprit != rank) return {*culprit};
  if (culprit || !lost_another(ranks[rank])) return {};
  std::vector<std::size_t> failed, left;
  for (const std::size_t other : ended) {
    if (!lost_another(ranks[other]) && ranks[other].ended_independently)
      (ranks[other].ended_well ? left : failed).push_back(other);
  }
  for (std::size_t other = 0; other < ranks.size(); ++other) {
    if (!lost_another(ranks[other]) && ranks[other].running && ranks[other].has_left) failed.push_back(other);
  }
  return failed.empty() ? left : failed;
}

}  // namespace

std::vector<std::size_t> suspects(std::size_t first, const std::vector<Evidence>& ranks,
                                  const std::vector<std::size_t>& ended) {
  std::vector<std::size_t> result;
  for (std::size_t hops = 0; hops <= ranks.size(); ++hops) {
    std::vector<std::size_t> next = blamed_by(result.empty() ? first : result.front(), ranks, ended);
    if (next.empty()) return result;
    result = std::move(next);
  }
  return {};  // The ranks blame each other: the first to end is the cause.
}

}  // namespace ddpkit::launch
