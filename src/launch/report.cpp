#include "launch/report.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

namespace ddpkit {
namespace launcher {
namespace {

std::vector<std::size_t> blamed_by(std::size_t rank, const std::vector<Evidence>& ranks,
                                   const std::vector<std::size_t>& ended) {
  const std::optional<std::size_t> failed_rank = ranks[rank].failed_rank;
  // After a timeout, the blamed rank is silent but has not failed.
  if (failed_rank && ranks[rank].failure == FailureKind::kTimeout) return {};
  if (failed_rank && *failed_rank != rank) return {*failed_rank};
  if (failed_rank || !lost_another(ranks[rank].failure)) return {};
  std::vector<std::size_t> failed, left;
  for (const std::size_t other : ended) {
    if (!lost_another(ranks[other].failure) && ranks[other].ended_independently)
      (ranks[other].ended_well ? left : failed).push_back(other);
  }
  for (std::size_t other = 0; other < ranks.size(); ++other) {
    if (!lost_another(ranks[other].failure) && ranks[other].running && ranks[other].has_left) failed.push_back(other);
  }
  return failed.empty() ? left : failed;
}

}  // namespace

bool lost_another(FailureKind failure) { return failure == FailureKind::kPeerLost || failure == FailureKind::kTimeout; }

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

std::string describe(const HungRank& rank, int first_rank) {
  std::string text = fmt::format("  rank {} (pid {}) {}\n", first_rank + rank.rank, rank.pid, rank.state);
  for (std::size_t begin = 0; begin < rank.stack.size();) {
    const std::size_t end = std::min(rank.stack.find('\n', begin), rank.stack.size());
    text += "    " + rank.stack.substr(begin, end - begin) + "\n";
    begin = end + 1;
  }
  return text;
}

}  // namespace launcher

std::string RankExit::describe() const {
  if (awaited && ended_by_launcher) return "left the process group while the others waited for it";
  if (signal == 0)
    return fmt::format("exited with code {}{}", exit_code,
                       before_rendezvous ? " before it connected to the other ranks"
                       : awaited         ? " while the others waited for it"
                                         : "");
  const char* name = ::sigabbrev_np(signal);
  return fmt::format("was killed by signal {}{}", signal, name ? fmt::format(" (SIG{})", name) : "");
}

int LaunchResult::exit_code() const noexcept {
  if (first_failure && (first_failure->before_rendezvous || first_failure->awaited)) return 1;
  if (first_failure) return first_failure->signal != 0 ? 128 + first_failure->signal : first_failure->exit_code;
  if (timed_out) return 124;
  if (stopped_by_signal != 0) {
    // Ranks that exit with 0 after a signal to stop have succeeded.
    for (const RankExit& end : ranks) {
      if (!end.ok()) return 128 + stopped_by_signal;
    }
  }
  return 0;
}

std::string LaunchResult::summary() const {
  if (!first_failure) return {};
  const RankExit& first = *first_failure;
  std::string text = fmt::format("rank {} (pid {}) {}, {:.1f} s after the start", first_rank + first.rank, first.pid,
                                 first.describe(), first.seconds);
  if (ranks.size() > 1) text += "; the other ranks were ended";
  text += "\n";
  if (!first.state.empty()) text += fmt::format("  it {}\n", first.state);
  if (!hung.empty()) text += "  waited for:\n";
  for (const HungRank& rank : hung) text += launcher::describe(rank, first_rank);
  if (!first.last_lines.empty()) text += "  its last lines on stderr:\n";
  for (const std::string& line : first.last_lines) text += "    " + line + "\n";
  return text;
}

}  // namespace ddpkit
