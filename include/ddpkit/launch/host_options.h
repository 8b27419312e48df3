// Tier 0: the standard library only.
#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace ddpkit {

/// Options of launch_on_hosts(): the rendezvous of the launchers. Equal on all hosts.
struct HostOptions {
  /// Address of host 0, and the port of its store. The first launcher on the host with this address serves the store.
  std::string address = {};
  int port = 29400;             ///< torchrun's default.
  std::string run_id = "none";  ///< Only launchers with the same name and the same key can join.
  int min_hosts = 1;            ///< A round needs this number of hosts.
  int max_hosts = 1;            ///< Further hosts wait for a later round.
  /// Restarts of all ranks after the failure of a rank.
  int max_restarts = 0;
  /// Wait for up to `max_hosts` hosts after `min_hosts` have come. Only before the first round.
  std::chrono::milliseconds last_call_timeout = std::chrono::seconds(30);
  std::chrono::milliseconds join_timeout = std::chrono::seconds(600);  ///< Wait for `min_hosts` hosts.
  /// A host whose launcher sends no heartbeat for this time is lost.
  std::chrono::milliseconds heartbeat_timeout = std::chrono::seconds(4);
  /// Receives what happens on all hosts: one sentence, or the report of a rank. Two threads may call it.
  std::function<void(const std::string& text)> on_report = nullptr;
};

}  // namespace ddpkit
