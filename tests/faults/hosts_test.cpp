// The fault matrix: launchers of several hosts, and failures of their ranks.
#include <sys/socket.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "faults/hosts.h"
#include "faults/training.h"

using namespace ddpkit::testing;
using Arguments = std::vector<std::string>;

namespace {

std::set<std::string> lines_of(const std::string& text) {
  std::set<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    const bool has_prefix = line.starts_with("[rank ");
    lines.insert(has_prefix ? line.substr(line.find("] ") + 2) : line);
  }
  return lines;
}

const Arguments kTwo{"--nnodes", "2"};

}  // namespace

TEST_CASE("the ranks of launchers at an endpoint have torchrun's variables", "[faults][hosts]") {
  const Endpoint endpoint;
  const std::string script =
      "echo $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $TORCHELASTIC_RUN_ID "
      "$TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS $MASTER_ADDR";
  const Arguments command = endpoint.shell({"--nnodes", "3", "--max-restarts", "4"}, script, 2);
  FaultRun first(command);
  endpoint.wait_for_host_0();
  FaultRun second(command), third(command);
  for (FaultRun* run : {&first, &second, &third}) CHECK(run->wait() == 0);
  std::set<std::string> expected;
  for (int rank = 0; rank < 6; ++rank)
    expected.insert(fmt::format("{} {} {} 6 2 job 0 4 localhost", rank, rank % 2, rank / 2));
  CHECK(lines_of(first.out() + first.err() + second.out() + second.err() + third.out() + third.err()) == expected);
  // The launcher that serves the store is host 0, whichever came first to a later round.
  CHECK(first.out() == "0 0 0 6 2 job 0 4 localhost\n");
}

TEST_CASE("hosts at an endpoint train together", "[faults][hosts][gloo]") {
  const Endpoint endpoint;
  const FaultFolder folder;
  const Arguments command = endpoint.worker(folder, kTwo, {"--steps", "5", "--backend", "gloo"}, 2);
  FaultRun first(command);
  endpoint.wait_for_host_0();
  // A stranger connects and sends nothing, another one sends noise.
  const int silent = endpoint.connect();
  const int noisy = endpoint.connect();
  REQUIRE((silent >= 0 && noisy >= 0));
  const std::string noise(4096, 'x');
  CHECK(::send(noisy, noise.data(), noise.size(), MSG_NOSIGNAL) > 0);
  FaultRun second(command);
  CHECK(first.wait() == 0);
  CHECK(second.wait() == 0);
  CAPTURE(first.err(), second.err());
  CHECK(first.out() == "done after 5 steps\n");
  CHECK(second.out().empty());
  ::close(silent);
  ::close(noisy);
}

TEST_CASE("only launchers with the key and the name of the run can join", "[faults][hosts]") {
  const Endpoint endpoint;
  const Arguments command = endpoint.shell(kTwo, "exit 0");
  FaultRun first(command);
  endpoint.wait_for_host_0();
  const auto refusal = [&](const std::string& option, const std::string& value) {
    Arguments other = command;
    const auto at = std::ranges::find(other, option);
    REQUIRE(at != other.end());
    *(at + 1) = value;
    FaultRun run(other);
    CHECK(run.wait() == 1);
    return run.err();
  };
  CHECK_THAT(refusal("--key-file", endpoint.make_key("other", 'b')), ContainsSubstring("its key is not the key of"));
  CHECK_THAT(refusal("--rdzv-id", "other"), ContainsSubstring("it belongs to the run \"other\""));
  CHECK_THAT(refusal("--nnodes", "3"), ContainsSubstring("1 ranks per host, --nnodes 3:3, --max-restarts 0, but host 0 "
                                                         "has 1 ranks per host, --nnodes 2:2, --max-restarts 0"));
  CHECK_THAT(refusal("-n", "2"), ContainsSubstring("this launcher has 2 ranks per host"));
  // The refused launchers changed nothing.
  FaultRun second(command);
  CHECK(first.wait() == 0);
  CHECK(second.wait() == 0);
  CHECK_THAT(first.err() + second.err(), !ContainsSubstring("ddpkit run:"));
}

TEST_CASE("wrong options of an endpoint are refused with one sentence", "[faults][hosts]") {
  const auto refusal = [](const Arguments& options, int code) {
    Arguments arguments{"run", "-n", "1"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    arguments.insert(arguments.end(), {"--", "true"});
    FaultRun run(arguments, {"env", "-u", "DDPKIT_KEY_FILE"});
    CHECK(run.wait() == code);
    CHECK(std::ranges::count(run.err(), '\n') == 1);
    return run.err();
  };
  CHECK_THAT(refusal({"--nnodes", "2", "--rdzv-endpoint", "localhost"}, 1), ContainsSubstring("add --key-file FILE"));
  CHECK_THAT(refusal({"--nnodes", "1:2"}, 1), ContainsSubstring("--nnodes 1:2 needs --rdzv-endpoint"));
  CHECK_THAT(refusal({"--nnodes", "2:1"}, 2), ContainsSubstring("or a range MIN:MAX"));
  CHECK_THAT(refusal({"--nnodes", "0"}, 2), ContainsSubstring("a number from 1 to 4096"));
  CHECK_THAT(refusal({"--rdzv-endpoint", "localhost:0"}, 2), ContainsSubstring("HOST:PORT"));
  CHECK_THAT(refusal({"--rdzv-endpoint", "localhost", "--node-rank", "1"}, 2), ContainsSubstring("excludes"));
  CHECK_THAT(refusal({"--rdzv-endpoint", "localhost", "--master-addr", "a"}, 2), ContainsSubstring("excludes"));
  CHECK_THAT(refusal({"--rdzv-id", "job"}, 2), ContainsSubstring("needs --rdzv-endpoint"));
  CHECK_THAT(refusal({"--rdzv-endpoint", "localhost", "--rdzv-conf", "timeout=1"}, 2),
             ContainsSubstring("last_call_timeout=SECONDS"));
  CHECK_THAT(refusal({"--nnodes", "2", "--master-addr", "localhost", "--max-restarts", "1"}, 1),
             ContainsSubstring("needs --rdzv-endpoint HOST:PORT and --key-file FILE"));
}

TEST_CASE("hosts that do not come are an error after the join timeout", "[faults][hosts]") {
  const Endpoint endpoint;
  FaultRun alone(endpoint.shell({"--nnodes", "2", "--rdzv-conf", "join_timeout=0.5"}, "exit 0"));
  CHECK(alone.wait() == 1);
  CHECK_THAT(alone.err(), ContainsSubstring("the rendezvous timed out: only 1 of 2 hosts have come to " +
                                            endpoint.address() + " within 0.5 s\n"));
  // The address of another host, on which nobody serves the store.
  Arguments command = endpoint.shell({"--nnodes", "2", "--rdzv-conf", "join_timeout=0.5"}, "exit 0");
  const TakenPort taken;
  *(std::ranges::find(command, "--rdzv-endpoint") + 1) = fmt::format("127.0.0.1:{}", taken.port());
  FaultRun foreign(command);
  CHECK(foreign.wait() == 1);
  CHECK_THAT(foreign.err(), ContainsSubstring("the handshake with the store at"));
}

TEST_CASE("the first failed rank ends all hosts and is named on all of them", "[faults][hosts]") {
  for (const int victim : {0, 1, 2}) {
    CAPTURE(victim);
    const Endpoint endpoint;
    const Arguments command =
        endpoint.shell({"--nnodes", "3"}, fmt::format("[ $RANK = {} ] || exec sleep 300; sleep 0.3; exit 7", victim));
    FaultRun first(command);
    endpoint.wait_for_host_0();
    FaultRun second(command), third(command);
    for (FaultRun* run : {&first, &second, &third}) {
      CHECK(run->wait() == 7);
      CHECK_THAT(run->err(), ContainsSubstring("ddpkit run: " + host_name(victim) + ": rank " + std::to_string(victim) +
                                               " (pid ") &&
                                 ContainsSubstring("exited with code 7"));
      CHECK(run->orphans() == std::vector<int>());
    }
    add_row(fmt::format("exit 7 of a rank of host {} of 3", victim), "named on all hosts, exit code 7",
            first.seconds());
  }
}

TEST_CASE("a rank that lost its peer on another host is not the first failure", "[faults][hosts][gloo]") {
  for (const std::string act : {"kill", "abort", "throw-slowly"}) {
    for (const int victim : {0, 1}) {
      CAPTURE(act, victim);
      const Endpoint endpoint;
      const FaultFolder folder;
      const Arguments command =
          endpoint.worker(folder, kTwo, {"--act", act, "--victim", std::to_string(victim), "--backend", "gloo"});
      FaultRun first(command);
      endpoint.wait_for_host_0();
      FaultRun second(command);
      const int code = act == "kill" ? 137 : act == "abort" ? 134 : 1;
      const std::string how = act == "kill"    ? "was killed by signal 9 (SIGKILL)"
                              : act == "abort" ? "was killed by signal 6 (SIGABRT)"
                                               : "exited with code 1,";
      for (FaultRun* run : {&first, &second}) {
        CHECK(run->wait() == code);
        CAPTURE(run->err());
        CHECK_THAT(run->err(), ContainsSubstring(fmt::format("{}: rank {} (pid {}) {}", host_name(victim), victim,
                                                             folder.pid_of(victim), how)));
        CHECK(run->orphans() == std::vector<int>());
      }
      add_row(fmt::format("{} of a rank of host {} of 2", act, victim), "named on both hosts",
              folder.ended_after(first));
    }
  }
}

TEST_CASE("a host whose ranks exit with 0 while the others wait is named", "[faults][hosts][gloo]") {
  const Endpoint endpoint;
  const FaultFolder folder;
  const Arguments command = endpoint.worker(folder, kTwo, {"--act", "exit-early", "--backend", "gloo"});
  FaultRun first(command);
  endpoint.wait_for_host_0();
  FaultRun second(command);
  for (FaultRun* run : {&first, &second}) {
    CHECK(run->wait() == 1);
    CHECK_THAT(run->err(), ContainsSubstring(host_name(0) + ": rank 0 (pid ") &&
                               ContainsSubstring(host_name(1) + ": its ranks exited with code 0 before\n"));
  }
}

TEST_CASE("all hosts restart together", "[faults][hosts]") {
  const Endpoint endpoint;
  const Folder marks;
  // A rank fails after both ranks have started.
  const auto command = [&](int restarts) {
    return endpoint.shell({"--nnodes", "2", "--max-restarts", std::to_string(restarts)},
                          "cd " + marks.path().string() + "; echo $GROUP_RANK $RANK $TORCHELASTIC_RESTART_COUNT " +
                              "$TORCHELASTIC_MAX_RESTARTS; [ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0; touch " +
                              "$TORCHELASTIC_MAX_RESTARTS-$TORCHELASTIC_RESTART_COUNT-$RANK; "
                              "[ $RANK = $TORCHELASTIC_RESTART_COUNT ] || exec sleep 300; while [ ! -e "
                              "$TORCHELASTIC_MAX_RESTARTS-$TORCHELASTIC_RESTART_COUNT-$((1-RANK)) ]; do sleep 0.02; "
                              "done; exit 9");
  };
  FaultRun first(command(2));
  endpoint.wait_for_host_0();
  FaultRun second(command(2));
  CHECK(first.wait() == 0);
  CHECK(second.wait() == 0);
  CHECK(first.out() == "0 0 0 2\n0 0 1 2\n0 0 2 2\n");
  for (const FaultRun* run : {&first, &second}) {
    CHECK_THAT(run->err(), ContainsSubstring("restart 1 of 2") && ContainsSubstring("restart 2 of 2"));
    CHECK_THAT(run->err(),
               ContainsSubstring(host_name(0) + ": rank 0") && ContainsSubstring(host_name(1) + ": rank 1"));
  }
  CHECK(second.out() == "1 1 0 2\n1 1 1 2\n1 1 2 2\n");

  FaultRun third(command(1));
  endpoint.wait_for_host_0();
  FaultRun fourth(command(1));
  for (FaultRun* run : {&third, &fourth}) {
    CHECK(run->wait() == 9);
    CHECK_THAT(run->err(), ContainsSubstring("ddpkit run: all 1 restarts are used up\n"));
  }
}

TEST_CASE("training of several hosts resumes with the weights of an undisturbed run", "[faults][hosts][gloo]") {
  const auto train = [](const Folder& folder, int kills) {
    const Endpoint endpoint;
    Arguments launcher = endpoint.options({"--nnodes", "2", "--max-restarts", std::to_string(kills)});
    const Arguments command = training(folder.path(), {"--epochs", "80", "--json"}, launcher, 1);
    FaultRun first(command);
    endpoint.wait_for_host_0();
    FaultRun second(command);
    for (int i = 0; i < kills; ++i) {
      // After the first epochs, so that a checkpoint exists.
      first.wait_for(fmt::format("\"epoch\":{}", 5 + 10 * i));
      std::vector<int> ranks;
      while ((ranks = ranks_of(i % 2 == 0 ? second.pid() : first.pid())).empty())
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      REQUIRE(::kill(ranks[0], SIGKILL) == 0);
      second.wait_for(fmt::format("restart {} of {}", i + 1, kills));
    }
    CHECK(first.wait(std::chrono::seconds(120)) == 0);
    CHECK(second.wait() == 0);
    CHECK(first.orphans() == std::vector<int>());
    CHECK(second.orphans() == std::vector<int>());
    if (kills > 0)
      add_row("kills of ranks of two hosts, restarts", "weights of a run never disturbed", first.seconds());
  };
  const Folder whole, disturbed;
  train(whole, 0);
  train(disturbed, 2);
  CHECK(same_bits(har::testing::weights_of(whole), har::testing::weights_of(disturbed)));
}

TEST_CASE("a host that cannot start its ranks is named on all hosts", "[faults][hosts]") {
  const Endpoint endpoint;
  const Arguments command = endpoint.shell(kTwo, "exec sleep 300");
  FaultRun first(command);
  endpoint.wait_for_host_0();
  FaultRun second(command, {"/usr/bin/env", "PATH=/absent"});
  for (FaultRun* run : {&first, &second}) {
    CHECK(run->wait() == 1);
    CHECK_THAT(run->err(), ContainsSubstring(host_name(1) + ": cannot start its ranks: cannot start \"sh\""));
  }
}

TEST_CASE("a signal to one launcher ends all hosts", "[faults][hosts]") {
  const Endpoint endpoint;
  const Arguments command = endpoint.shell({"--nnodes", "2", "--max-restarts", "3"}, "echo ready; exec sleep 300");
  FaultRun first(command);
  endpoint.wait_for_host_0();
  FaultRun second(command);
  first.wait_for("ready");
  second.wait_for("ready");
  second.signal(SIGTERM);
  for (FaultRun* run : {&first, &second}) {
    CHECK(run->wait() == 128 + SIGTERM);
    CHECK_THAT(run->err(), ContainsSubstring(host_name(1) + ": was stopped by signal 15 (SIGTERM)"));
    CHECK(run->orphans() == std::vector<int>());
  }
}
