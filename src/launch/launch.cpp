#include <ddpkit/launch/launcher.h>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "launch/host_rounds.h"
#include "launch/launch_round.h"

namespace ddpkit {

namespace {

void check(const LaunchOptions& options) {
  if (options.ranks < 1) throw InvalidArgument(fmt::format("{} ranks cannot be started: at least 1", options.ranks));
  if (options.command.empty()) throw InvalidArgument("there is no program to start");
  if (options.min_ranks > options.ranks)
    throw InvalidArgument(fmt::format("at least {} ranks cannot remain of {}", options.min_ranks, options.ranks));
  if (options.max_replacements > 0 && options.min_ranks < 1)
    throw InvalidArgument("lost ranks are replaced only if the others continue: set min_ranks");
}

}  // namespace

LaunchResult launch(const LaunchOptions& options) {
  check(options);
  if (options.nodes < 1 || options.node_rank < 0 || options.node_rank >= options.nodes)
    throw InvalidArgument(fmt::format("there is no host {} among {}", options.node_rank, options.nodes));
  if (options.nodes > 1 && (options.master_port == 0 || options.master_addr == "127.0.0.1"))
    throw InvalidArgument(
        fmt::format("{} hosts need the address and port of host 0: set master_addr and master_port", options.nodes));
  return launcher::launch_round(options, nullptr);
}

int launch_on_hosts(const LaunchOptions& options, const HostOptions& hosts) {
  if (hosts.min_hosts < 1 || hosts.max_hosts < hosts.min_hosts)
    throw InvalidArgument(fmt::format("{} to {} hosts cannot form a round", hosts.min_hosts, hosts.max_hosts));
  check(options);
  LaunchOptions round = options;
  round.run_id = hosts.run_id;
  round.master_addr = hosts.address;
  // A lost host permits a further round. Trainers must know that they may be started again (--overwrite).
  round.max_restarts = hosts.max_restarts + hosts.max_hosts - hosts.min_hosts;
  launcher::HostRounds rounds(options, hosts);
  for (;;) {
    const launcher::HostRounds::Round next = rounds.next();
    if (next.exit_code) return *next.exit_code;
    round.nodes = next.hosts;
    round.node_rank = next.host;
    round.master_port = next.port;
    round.restart_count = next.number;
    rounds.watch();
    launcher::HostResult result;
    try {
      result = launcher::result_of(launcher::launch_round(round, &rounds));
    } catch (const Error& error) {
      result = {.is_ok = false, .exit_code = 1, .text = fmt::format("cannot start its ranks: {}\n", error.what())};
    }
    rounds.finish(result);
  }
}

}  // namespace ddpkit
