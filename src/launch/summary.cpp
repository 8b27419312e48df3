#include "launch/summary.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

namespace ddpkit {
namespace launch {

std::string describe(const SilentRank& rank, int first_rank) {
  std::string text = fmt::format("  rank {} (pid {}) {}\n", first_rank + rank.rank, rank.pid, rank.state);
  for (std::size_t begin = 0; begin < rank.stack.size();) {
    const std::size_t end = std::min(rank.stack.find('\n', begin), rank.stack.size());
    text += "    " + rank.stack.substr(begin, end - begin) + "\n";
    begin = end + 1;
  }
  return text;
}

}  // namespace launch

std::string RankExit::describe() const {
  if (awaited && ended_by_launcher) return "left the process group while the others waited for it";
  if (signal == 0)
    return fmt::format("exited with code {}{}", exit_code,
                       before_meeting ? " before it connected to the other ranks"
                       : awaited      ? " while the others waited for it"
                                      : "");
  const char* name = ::sigabbrev_np(signal);
  return fmt::format("was killed by signal {}{}", signal, name ? fmt::format(" (SIG{})", name) : "");
}

int LocalLaunchResult::exit_code() const noexcept {
  if (first_failure && (first_failure->before_meeting || first_failure->awaited)) return 1;
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

std::string LocalLaunchResult::summary() const {
  if (!first_failure) return {};
  const RankExit& first = *first_failure;
  std::string text = fmt::format("rank {} (pid {}) {}, {:.1f} s after the start", first_rank + first.rank, first.pid,
                                 first.describe(), first.seconds);
  if (ranks.size() > 1) text += "; the other ranks were ended";
  text += "\n";
  if (!first.state.empty()) text += fmt::format("  it {}\n", first.state);
  if (!silent.empty()) text += "  waited for:\n";
  for (const SilentRank& rank : silent) text += launch::describe(rank, first_rank);
  if (!first.last_lines.empty()) text += "  its last lines on stderr:\n";
  for (const std::string& line : first.last_lines) text += "    " + line + "\n";
  return text;
}

}  // namespace ddpkit
