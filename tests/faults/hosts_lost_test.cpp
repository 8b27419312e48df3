// The fault matrix: hosts that vanish, and rounds with a range of hosts.
#include <signal.h>

#include <memory>
#include <utility>

#include "faults/hosts.h"

using namespace ddpkit::testing;
using Arguments = std::vector<std::string>;

namespace {

/// The worker's collectives have a timeout that no test reaches.
const Arguments kEndless{"--steps", "1000000", "--act", "slow", "--timeout", "600", "--backend", "gloo"};

/// Launchers that run, the first one as host 0.
std::vector<std::unique_ptr<FaultRun>> start(const Endpoint& endpoint, const Arguments& command, int hosts) {
  std::vector<std::unique_ptr<FaultRun>> runs;
  for (int host = 0; host < hosts; ++host) {
    runs.push_back(std::make_unique<FaultRun>(command));
    endpoint.wait_for_host_0();
  }
  return runs;
}

std::string lost_host_0(const Endpoint& endpoint) {
  return "host 0 (" + endpoint.address() +
         "), which serves the store, is lost; start the same command again on all hosts: the run resumes from its last "
         "checkpoint\n";
}

std::string too_few(int host) {
  return host_name(host) + " is lost: 1 host is left, but --nnodes needs at least 2; start the same command again";
}

}  // namespace

TEST_CASE("a killed or stopped launcher of a host ends the run", "[faults][hosts][gloo]") {
  for (const int number : {SIGKILL, SIGSTOP}) {
    CAPTURE(number);
    const Endpoint endpoint;
    const FaultFolder folder;
    const auto runs =
        start(endpoint, endpoint.worker(folder, {"--nnodes", "2", "--heartbeat-timeout", "1"}, kEndless), 2);
    FaultRun &first = *runs[0], &second = *runs[1];
    folder.pid_of(0);
    const int rank_1 = folder.pid_of(1);
    const double fault = now_seconds();
    second.signal(number);
    CHECK(first.wait() == 75);
    CAPTURE(first.err());
    CHECK_THAT(first.err(), ContainsSubstring(too_few(1)));
    // The ranks of a stopped launcher still run.
    if (number == SIGSTOP)
      CHECK_THAT(first.err(), ContainsSubstring(host_name(1) + " has sent no heartbeat for 1.0 s\n"));
    CHECK(first.orphans() == std::vector<int>());
    add_row(fmt::format("signal {} to the launcher of host 1", number), "host 0 names it and ends with 75",
            first.ended_at() - fault);
    if (number == SIGSTOP) {
      CHECK(::kill(rank_1, 0) == 0);
      second.signal(SIGCONT);
      CHECK(second.wait() == 75);
      CHECK_THAT(second.err(), ContainsSubstring(lost_host_0(endpoint)));
    } else {
      CHECK(second.wait() == 137);
    }
    CHECK(second.orphans() == std::vector<int>());
  }
}

TEST_CASE("a killed or stopped launcher of host 0 ends the others", "[faults][hosts][gloo]") {
  for (const int number : {SIGKILL, SIGSTOP}) {
    CAPTURE(number);
    const Endpoint endpoint;
    const FaultFolder folder;
    // Host 0 alone may continue: the others end though MIN of them are left.
    const auto runs = start(
        endpoint,
        endpoint.worker(folder, {"--nnodes", "2:3", "--heartbeat-timeout", "1", "--max-restarts", "3"}, kEndless), 3);
    for (const int rank : {0, 1, 2}) folder.pid_of(rank);
    const double fault = now_seconds();
    runs[0]->signal(number);
    for (const int host : {1, 2}) {
      CHECK(runs[static_cast<std::size_t>(host)]->wait() == 75);
      CAPTURE(runs[static_cast<std::size_t>(host)]->err());
      CHECK_THAT(runs[static_cast<std::size_t>(host)]->err(), ContainsSubstring(lost_host_0(endpoint)));
      CHECK(runs[static_cast<std::size_t>(host)]->orphans() == std::vector<int>());
    }
    add_row(fmt::format("signal {} to the launcher of host 0", number), "the others name it and end with 75",
            runs[2]->ended_at() - fault);
    if (number == SIGSTOP) runs[0]->signal(SIGCONT);
    CHECK(runs[0]->wait() == (number == SIGSTOP ? 75 : 137));
    CHECK(runs[0]->orphans() == std::vector<int>());
  }
}

TEST_CASE("a launcher that is stopped for less than the timeout is not lost", "[faults][hosts]") {
  for (const std::size_t stopped : {0, 1}) {
    const Endpoint endpoint;
    const auto runs =
        start(endpoint, endpoint.shell({"--nnodes", "2", "--heartbeat-timeout", "8"}, "echo ready; sleep 3"), 2);
    for (const auto& run : runs) run->wait_for("ready");
    runs[stopped]->signal(SIGSTOP);
    std::this_thread::sleep_for(std::chrono::seconds(2));
    runs[stopped]->signal(SIGCONT);
    for (const auto& run : runs) {
      CHECK(run->wait() == 0);
      CHECK_THAT(run->err(), !ContainsSubstring("ddpkit run"));
    }
  }
}

TEST_CASE("the next round runs on the hosts that are left", "[faults][hosts]") {
  const Endpoint endpoint;
  const Arguments options{"--nnodes", "1:3", "--heartbeat-timeout", "1"};
  auto runs = start(endpoint,
                    endpoint.shell(options,
                                   "echo world $WORLD_SIZE group $GROUP_RANK count $TORCHELASTIC_RESTART_COUNT; "
                                   "[ $WORLD_SIZE = 1 ] || exec sleep 300"),
                    3);
  for (const auto& run : runs) run->wait_for("world 3");
  if (runs[1]->out().find("group 1") == std::string::npos) std::swap(runs[1], runs[2]);
  runs[1]->signal(SIGKILL);
  runs[0]->wait_for("world 2 group 0 count 1");
  runs[2]->wait_for("world 2 group 1 count 1");
  CHECK_THAT(runs[2]->err(), ContainsSubstring(host_name(1) + " is lost; 2 hosts resume from the last checkpoint\n"));
  runs[2]->signal(SIGSTOP);
  runs[0]->wait_for("world 1 group 0 count 2");
  CHECK(runs[0]->wait() == 0);
  CHECK_THAT(runs[0]->err(), ContainsSubstring(host_name(1) + " is lost; 1 host resumes from the last checkpoint\n"));
  runs[2]->signal(SIGCONT);
  CHECK(runs[2]->wait() == 75);
  runs[1]->wait();
  for (const auto& run : runs) CHECK(run->orphans() == std::vector<int>());
}

TEST_CASE("a round begins with fewer hosts after the last call", "[faults][hosts]") {
  const Endpoint endpoint;
  const auto runs = start(
      endpoint, endpoint.shell({"--nnodes", "2:3", "--rdzv-conf", "last_call_timeout=0.3"}, "echo $WORLD_SIZE"), 2);
  for (const auto& run : runs) CHECK(run->wait() == 0);
  CHECK(runs[0]->out() == "2\n");
}

TEST_CASE("a host that comes late takes part in the next round", "[faults][hosts]") {
  const Endpoint endpoint;
  const Folder folder;
  const std::string end = folder / "end";
  const Arguments command =
      endpoint.shell({"--nnodes", "1:2", "--max-restarts", "1", "--rdzv-conf", "last_call_timeout=0"},
                     "echo world $WORLD_SIZE count $TORCHELASTIC_RESTART_COUNT; [ $WORLD_SIZE = 2 ] && exit 0; while [ "
                     "! -e " +
                         end + " ]; do sleep 0.02; done; exit 5");
  const auto runs = start(endpoint, command, 1);
  runs[0]->wait_for("world 1 count 0");
  FaultRun late(command);
  late.wait_for("this host waits for the next round");
  write_file(end, "");
  CHECK(runs[0]->wait() == 0);
  CHECK(late.wait() == 0);
  CHECK(runs[0]->out() == "world 1 count 0\nworld 2 count 1\n");
}

TEST_CASE("a host that waits for a round ends with the run", "[faults][hosts]") {
  for (const int code : {0, 6}) {
    const Endpoint endpoint;
    const Folder folder;
    const std::string end = folder / "end";
    const Arguments command = endpoint.shell(
        {"--nnodes", "1"}, "echo ready; while [ ! -e " + end + " ]; do sleep 0.02; done; exit " + std::to_string(code));
    const auto runs = start(endpoint, command, 1);
    runs[0]->wait_for("ready");
    FaultRun spare(command);
    spare.wait_for("this host waits for the next round");
    write_file(end, "");
    CHECK(runs[0]->wait() == code);
    CHECK(spare.wait() == code);
    CHECK(spare.out().empty());
  }
}
