#include "launch/host_messages.h"

#include <signal.h>

#include <ddpkit/launch/launcher.h>

#include "support/catch.h"

using namespace ddpkit::launcher;
using ddpkit::HostOptions;
using ddpkit::LaunchResult;
using std::chrono::seconds;

namespace {

RoundHost ended(const std::string& name, const HostResult& result) { return {.name = name, .result = result}; }
HostResult failed(int code, bool lost_peer = false) {
  return {.is_ok = false, .lost_peer = lost_peer, .exit_code = code, .text = "code " + std::to_string(code) + "\n"};
}
/// Its ranks were ended because of another host.
const HostResult kFollowed{.is_ok = false};
const HostResult kFine;
using Report = std::vector<std::string>;

}  // namespace

TEST_CASE("the first round begins with all hosts, or with enough hosts after the last call", "[hosts]") {
  const HostOptions options{.min_hosts = 2, .max_hosts = 4, .last_call_timeout = seconds(30)};
  CHECK(hosts_of_first_round(1, seconds(100), options) == 0);
  CHECK(hosts_of_first_round(2, seconds(29), options) == 0);
  CHECK(hosts_of_first_round(2, seconds(30), options) == 2);
  CHECK(hosts_of_first_round(3, seconds(30), options) == 3);
  CHECK(hosts_of_first_round(4, seconds(0), options) == 4);
  CHECK(hosts_of_first_round(5, seconds(0), options) == 4);
}

TEST_CASE("the host whose rank lost no peer is the cause on all hosts", "[hosts]") {
  const HostOptions options{.min_hosts = 3, .max_hosts = 3};
  // The rank that lost its peer was first.
  Decision decision =
      decide({ended("a", failed(1, true)), ended("b", failed(7)), ended("c", kFollowed)}, 0, 3, 0, options);
  CHECK(!decision.continues);
  CHECK(decision.exit_code == 7);
  CHECK(decision.report == Report{"host 1 (b): code 7\n"});
  // Two ranks lost no peer.
  const std::vector<RoundHost> both{ended("a", failed(3)), ended("b", failed(7)), ended("c", failed(1, true))};
  CHECK(decide(both, 0, 3, 0, options).exit_code == 3);
  CHECK(decide(both, 1, 3, 0, options).exit_code == 7);
  CHECK(decide(both, 2, 3, 0, options).exit_code == 3);
  // All ranks lost a peer.
  CHECK(decide({ended("a", failed(1, true)), ended("b", failed(2, true))}, 1, 3, 0, options).exit_code == 2);
  // The peer had exited with code 0.
  decision = decide({ended("a", failed(1, true)), ended("b", kFine)}, 0, 3, 0, options);
  CHECK(decision.report == Report{"host 0 (a): code 1\n", "host 1 (b): its ranks exited with code 0 before\n"});
  // A failure is never a success.
  CHECK(decide({ended("a", kFollowed), ended("b", kFine)}, 0, 3, 0, options).exit_code == 1);
}

TEST_CASE("a round without a failure ends the run", "[hosts]") {
  const HostOptions options{.min_hosts = 2, .max_hosts = 2, .max_restarts = 3};
  // One host has ended its launcher meanwhile.
  const Decision decision = decide({ended("a", kFine), ended("b", kFine)}, {}, 1, 0, options);
  CHECK(!decision.continues);
  CHECK(decision.exit_code == 0);
  CHECK(decision.report.empty());
}

TEST_CASE("failures of ranks use up the restarts, lost hosts do not", "[hosts]") {
  const HostOptions options{.min_hosts = 1, .max_hosts = 2, .max_restarts = 2};
  const std::vector<RoundHost> failure{ended("a", kFollowed), ended("b", failed(7))};
  Decision decision = decide(failure, 1, 2, 1, options);
  CHECK((decision.continues && decision.is_restart));
  CHECK(decision.report == Report{"host 1 (b): code 7\n", "restarting all ranks (restart 2 of 2)\n"});
  decision = decide(failure, 1, 2, 2, options);
  CHECK(!decision.continues);
  CHECK(decision.exit_code == 7);
  CHECK(decision.report == Report{"host 1 (b): code 7\n", "all 2 restarts are used up\n"});

  const std::vector<RoundHost> loss{ended("a", failed(1, true)), {.name = "b"}};
  decision = decide(loss, 0, 1, 2, options);
  CHECK(decision.continues);
  CHECK(!decision.is_restart);
  CHECK(decision.report == Report{"host 1 (b) is lost; 1 host resumes from the last checkpoint\n"});
}

TEST_CASE("a lost host ends the run if too few remain", "[hosts]") {
  const HostOptions options{.min_hosts = 2, .max_hosts = 3, .max_restarts = 5};
  const std::vector<RoundHost> loss{ended("a", kFollowed), {.name = "b"}, {.name = "c"}};
  const Decision decision = decide(loss, 1, 1, 0, options);
  CHECK(!decision.continues);
  CHECK(decision.exit_code == ddpkit::kHostLost);
  CHECK(decision.report ==
        Report{"host 1 (b), host 2 (c) is lost: 1 host is left, but --nnodes needs at least 2; start the same command "
               "again on all hosts: the run resumes from its last checkpoint\n"});
  // A host that came in the meantime replaces the lost one.
  CHECK(decide(loss, 1, 2, 0, options).continues);
}

TEST_CASE("a launcher that is stopped by a signal ends the run", "[hosts]") {
  const HostOptions options{.min_hosts = 1, .max_hosts = 2, .max_restarts = 5};
  LaunchResult stopped;
  stopped.stopped_by_signal = SIGTERM;
  stopped.ranks.push_back({.rank = 0, .signal = SIGTERM, .ended_by_launcher = true});
  const Decision decision = decide({ended("a", failed(1, true)), ended("b", result_of(stopped))}, 0, 2, 0, options);
  CHECK(!decision.continues);
  CHECK(decision.exit_code == 128 + SIGTERM);
  CHECK(decision.report == Report{"host 1 (b): was stopped by signal 15 (SIGTERM)\n"});
  // Its ranks ended well: a trainer saves a checkpoint and exits with 0 on all hosts.
  stopped.ranks[0] = {.rank = 0};
  CHECK(decide({ended("a", kFine), ended("b", result_of(stopped))}, {}, 2, 0, options).exit_code == 0);
}

TEST_CASE("the messages of the launchers return as they were sent", "[hosts]") {
  const RoundPlan plan = read_plan(text_of(RoundPlan{.port = 29400, .members = {0, 2, 5}, .report = {"a\n", "", "b"}}));
  CHECK(!plan.exit_code);
  CHECK(plan.port == 29400);
  CHECK(plan.members == std::vector<int>{0, 2, 5});
  CHECK(plan.report == Report{"a\n", "", "b"});
  CHECK(read_plan(text_of(RoundPlan{.exit_code = 0})).exit_code == 0);
  const RoundEnd end = read_end(text_of(RoundEnd{.id = 3, .blamed_rank = 7, .text = "lost"}));
  CHECK((end.id == 3 && end.blamed_rank == 7 && end.text == "lost"));
  CHECK(read_end(text_of(RoundEnd{})).blamed_rank == -1);
  const HostResult result =
      read_result(text_of(HostResult{.is_ok = false, .lost_peer = true, .exit_code = 137, .signal = 15, .text = "t"}));
  CHECK((!result.is_ok && result.lost_peer && result.exit_code == 137 && result.signal == 15 && result.text == "t"));
}
