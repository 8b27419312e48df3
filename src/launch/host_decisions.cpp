#include "launch/host_decisions.h"

#include <signal.h>

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <ddpkit/launch/launcher.h>

namespace ddpkit::launcher {
namespace {

std::string count_text(std::size_t hosts) { return fmt::format("{} host{}", hosts, hosts == 1 ? "" : "s"); }

/// Returns the host whose failure caused the others: first a host whose rank lost no peer, among equals the host that
/// ended the round.
std::optional<std::size_t> cause_of(const std::vector<RoundHost>& hosts, std::optional<std::size_t> first) {
  std::optional<std::size_t> cause;
  const auto rank_of = [&](std::size_t host) { return 2 * (hosts[host].result->lost_peer ? 1 : 0) + (host != first); };
  for (std::size_t host = 0; host < hosts.size(); ++host) {
    if (!hosts[host].result || hosts[host].result->text.empty()) continue;
    if (!cause || rank_of(host) < rank_of(*cause)) cause = host;
  }
  return cause;
}

}  // namespace

std::string host_text(std::size_t host, const std::string& name) { return fmt::format("host {} ({})", host, name); }

HostResult result_of(const LaunchResult& launch) {
  HostResult result{.exit_code = launch.exit_code(), .signal = launch.stopped_by_signal};
  const bool are_ended = std::ranges::any_of(launch.ranks, [](const RankExit& end) { return end.ended_by_launcher; });
  result.is_ok = result.exit_code == 0 && !(launch.ended_by_hosts && are_ended);
  result.lost_peer = launch.first_failure && launch.first_failure->lost_peer;
  if (launch.first_failure) {
    result.text = launch.summary();
  } else if (result.signal != 0 && !result.is_ok) {
    const char* name = ::sigabbrev_np(result.signal);
    result.text = fmt::format("was stopped by signal {}{}\n", result.signal, name ? fmt::format(" (SIG{})", name) : "");
  } else if (launch.timed_out) {
    result.text = "reached the time limit\n";
  }
  return result;
}

std::size_t hosts_of_first_round(std::size_t present, std::chrono::milliseconds waited, const HostOptions& options) {
  const auto least = static_cast<std::size_t>(options.min_hosts), most = static_cast<std::size_t>(options.max_hosts);
  if (present >= most) return most;
  return present >= least && waited >= options.last_call_timeout ? present : 0;
}

Decision decide(const std::vector<RoundHost>& hosts, std::optional<std::size_t> first, std::size_t remaining,
                int restarts, const HostOptions& options) {
  Decision decision;
  std::string lost;
  bool all_ok = true;
  for (std::size_t host = 0; host < hosts.size(); ++host) {
    const auto& [name, result] = hosts[host];
    if (!result) lost += (lost.empty() ? "" : ", ") + host_text(host, name);
    all_ok = all_ok && result && result->is_ok;
  }
  if (all_ok) return decision;
  const std::optional<std::size_t> cause = cause_of(hosts, first);
  const HostResult failure = cause ? *hosts[*cause].result : HostResult{.is_ok = false, .exit_code = 1};
  // The failures of ranks that lost a peer follow from the loss of the host.
  if (cause && (lost.empty() || !failure.lost_peer))
    decision.report.push_back(fmt::format("{}: {}", host_text(*cause, hosts[*cause].name), failure.text));
  for (std::size_t host = 0; host < hosts.size() && failure.lost_peer; ++host) {
    if (hosts[host].result && hosts[host].result->is_ok)
      decision.report.push_back(
          fmt::format("{}: its ranks exited with code 0 before\n", host_text(host, hosts[host].name)));
  }
  decision.exit_code = std::max(1, failure.exit_code);
  const bool is_stopped = std::ranges::any_of(
      hosts, [](const RoundHost& host) { return host.result && !host.result->is_ok && host.result->signal != 0; });
  if (is_stopped) return decision;
  const bool is_enough = remaining >= static_cast<std::size_t>(options.min_hosts);
  if (!lost.empty() || !is_enough) {
    decision.continues = is_enough;
    decision.exit_code = kHostLost;
    decision.report.push_back(
        is_enough ? fmt::format("{} is lost; {} resume{} from the last checkpoint\n", lost, count_text(remaining),
                                remaining == 1 ? "s" : "")
                  : fmt::format("{} is lost: {} left, but --nnodes needs at least {}; start the same command again on "
                                "all hosts: the run resumes from its last checkpoint\n",
                                lost.empty() ? "a host" : lost,
                                count_text(remaining) + (remaining == 1 ? " is" : " are"), options.min_hosts));
    return decision;
  }
  decision.continues = decision.is_restart = restarts < options.max_restarts;
  if (decision.continues)
    decision.report.push_back(
        fmt::format("restarting all ranks (restart {} of {})\n", restarts + 1, options.max_restarts));
  else if (options.max_restarts > 0)
    decision.report.push_back(fmt::format("all {} restarts are used up\n", options.max_restarts));
  return decision;
}

}  // namespace ddpkit::launcher
