// Tier 0: the standard library only. The decisions of host 0 about rounds.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <ddpkit/launch/host_options.h>
#include <ddpkit/launch/launch_options.h>

namespace ddpkit::launcher {

/// How a round ended on one host.
struct HostResult {
  bool is_ok = true;       ///< All its ranks exited with code 0.
  bool lost_peer = false;  ///< Its rank failed because a rank of another host failed.
  int exit_code = 0;
  int signal = 0;         ///< The signal to the launcher that stopped its ranks, or 0.
  std::string text = {};  ///< Report of its failure; empty: its ranks were ended because of another host.
};

/// One host of a round that has ended.
struct RoundHost {
  std::string name;
  std::optional<HostResult> result = {};  ///< Empty: the host is lost.
};

struct Decision {
  bool continues = false;                ///< Another round begins.
  bool is_restart = false;               ///< That round counts as a restart.
  int exit_code = 0;                     ///< Of all launchers, if the run ends.
  std::vector<std::string> report = {};  ///< For all hosts. [line]
};

/// Returns "host 1 (node1)".
std::string host_text(std::size_t host, const std::string& name);

HostResult result_of(const LaunchResult& launch);

/// Returns the number of hosts with which the first round begins; 0: wait. `waited`: time since `min_hosts` had come.
std::size_t hosts_of_first_round(std::size_t present, std::chrono::milliseconds waited, const HostOptions& options);

/// Decides what follows a round. `first`: index of the host that ended the round, if one did. `remaining`: hosts for
/// the next round. `restarts`: restarts so far. `hosts`: [host].
Decision decide(const std::vector<RoundHost>& hosts, std::optional<std::size_t> first, std::size_t remaining,
                int restarts, const HostOptions& options);

}  // namespace ddpkit::launcher
