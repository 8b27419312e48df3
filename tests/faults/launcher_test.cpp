// The fault matrix: what happens to the launcher, and where the ranks meet.
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include <fmt/format.h>

#include "faults/fault_run.h"
#include "support/catch.h"
#include "support/port.h"

using namespace ddpkit::testing;
using Arguments = std::vector<std::string>;

TEST_CASE("a killed launcher takes its ranks and what they have started with it", "[faults]") {
  const FaultFolder folder;
  FaultRun run(worker_command(folder, {"-n", "2"}, {"--act", "stuck", "--victim", "1"}));
  // Both ranks hold shared memory.
  while (!folder.time_of("fault")) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const double killed = now_seconds();
  run.signal(SIGKILL);
  CHECK(run.wait() == 137);
  CHECK(run.orphans() == std::vector<int>());
  CHECK(folder.memory_holders() == std::vector<int>());
  add_row("kill -9 of the launcher", "no rank outlives it", now_seconds() - killed);

  FaultRun family({"run", "-n", "2", "--", "sh", "-c", "sleep 300 & sleep 300; :"});
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const double family_killed = now_seconds();
  family.signal(SIGKILL);
  CHECK(family.wait() == 137);
  CHECK(family.orphans() == std::vector<int>());
  add_row("kill -9 of the launcher of shell scripts", "no grandchild outlives it", now_seconds() - family_killed);
}

TEST_CASE("SIGUSR1 prints what every rank does", "[faults]") {
  const FaultFolder folder;
  FaultRun run(worker_command(folder, {"-n", "2", "--grace-seconds", "1"}, {"--act", "stuck", "--victim", "1"}));
  while (!folder.time_of("fault")) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const double asked = now_seconds();
  run.signal(SIGUSR1);
  run.wait_for("stuck_on_purpose");
  const double answered = now_seconds();
  CHECK_THAT(run.err(), ContainsSubstring(fmt::format("rank 0 (pid {}) is in ", folder.pid_of(0))));
  CHECK_THAT(run.err(), ContainsSubstring("bucket 0) at step 20 for"));
  CHECK_THAT(run.err(),
             ContainsSubstring(fmt::format("rank 1 (pid {}) is in no collective at step 20", folder.pid_of(1))));
  // Asking changes nothing: both run on until they are told to stop.
  run.signal(SIGTERM);
  CHECK(run.wait() == 128 + SIGTERM);
  CHECK(run.orphans() == std::vector<int>());
  add_row("SIGUSR1 to the launcher", "state and stack of all ranks, which run on", answered - asked);
}

TEST_CASE("ranks that ignore SIGTERM are killed after the grace time", "[faults]") {
  FaultRun run({"run", "-n", "2", "--grace-seconds", "0.5", "--", "sh", "-c",
                "trap '' TERM; echo ready; while :; do sleep 0.05; done"});
  run.wait_for("[rank 1] ready");
  const double told = now_seconds();
  run.signal(SIGTERM);
  CHECK(run.wait() == 128 + SIGTERM);
  CHECK(run.orphans() == std::vector<int>());
  add_row("ranks that ignore SIGTERM (grace 0.5 s)", "killed after the grace time", now_seconds() - told);
}

TEST_CASE("a rank that ends well before the others could meet it is named", "[faults]") {
  const FaultFolder folder;
  // The others would wait for half an hour.
  const auto but_rank_1 = [&](const Arguments& launcher, const std::string& before) {
    Arguments arguments = {"run"};
    arguments.insert(arguments.end(), launcher.begin(), launcher.end());
    arguments.insert(arguments.end(), {"--", "sh", "-c", before + "exec \"$0\" \"$@\"", DDPKIT_TEST_FAULT_WORKER,
                                       "--folder", folder.path().string(), "--steps", "5"});
    return arguments;
  };
  FaultRun run(but_rank_1({"-n", "2"}, "[ $RANK = 1 ] && exit 0; "));
  CHECK(run.wait() == 1);
  CHECK_THAT(run.err(), ContainsSubstring("ddpkit run: rank 1 (pid "));
  CHECK_THAT(run.err(), ContainsSubstring(") exited with code 0 before it met the others"));
  CHECK(run.orphans() == std::vector<int>());
  add_row("a rank exits with 0 before the meeting", "named, exit code 1", run.seconds());

  FaultRun again(but_rank_1({"-n", "2", "--max-restarts", "1"}, "[ $RANK = 1 ] && exit 0; "));
  CHECK(again.wait() == 1);
  CHECK_THAT(again.err(), ContainsSubstring("starting all ranks anew (restart 1 of 1)"));

  // Nobody waits for it: neither those that form a smaller world, nor those that know of no world at all.
  FaultRun smaller(but_rank_1({"-n", "3"},
                              "export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2; [ $RANK = 2 ] && exit 0; "
                              "[ $RANK = 1 ] && sleep 1; "));
  CHECK(smaller.wait() == 0);
  CHECK_THAT(smaller.out(), ContainsSubstring("done after 5 steps"));
  FaultRun none({"run", "-n", "2", "--", "sh", "-c", "[ $RANK = 1 ] || { sleep 1; echo slept; }"});
  CHECK(none.wait() == 0);
  CHECK(none.out() == "slept\n");
}

TEST_CASE("a launcher whose output nobody reads ends when it is told to", "[faults]") {
  const FaultFolder folder;
  const std::string pipe = folder / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  const int reader = ::open(pipe.c_str(), O_RDWR | O_NONBLOCK);
  REQUIRE(reader >= 0);
  FaultRun run({"run", "-n", "2", "--grace-seconds", "0.5", "--", "sh", "-c", "yes >&2"},
               {"sh", "-c", "exec \"$@\" 2> " + pipe, "sh"});
  const auto is_full = [&] {
    pollfd place{reader, POLLOUT, 0};
    return ::poll(&place, 1, 0) == 0;
  };
  while (!is_full()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const double told = now_seconds();
  run.signal(SIGTERM);
  CHECK(run.wait() == 128 + SIGTERM);
  CHECK(run.orphans() == std::vector<int>());
  add_row("SIGTERM while nobody reads its stderr", "ends after the grace time", now_seconds() - told);
  ::close(reader);
}

TEST_CASE("a session that ends tells the ranks to end, and leaves them the time for it", "[faults]") {
  const Arguments arguments = {"run",
                               "-n",
                               "2",
                               "--",
                               "sh",
                               "-c",
                               "trap 'sleep 0.3; echo saved >&2; exit 0' TERM; echo ready >&2; "
                               "while :; do sleep 0.05; done"};
  const auto is_ready = [](const FaultRun& run) {
    run.wait_for("[rank 1] ready\n");
    run.wait_for("\nready\n");
  };
  FaultRun run(arguments, {"sh", "-c", "echo >&2; exec \"$@\"", "sh"});
  is_ready(run);
  run.signal(SIGHUP);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  run.signal(SIGHUP);  // Of the kernel, and of the shell: one end.
  CHECK(run.wait() == 0);
  CHECK_THAT(run.err(), ContainsSubstring("\nsaved\n"));
  CHECK_THAT(run.err(), ContainsSubstring("[rank 1] saved\n"));

  FaultRun unheard(arguments, {"sh", "-c", "echo >&2; trap '' HUP; exec \"$@\"", "sh"});  // nohup
  is_ready(unheard);
  unheard.signal(SIGHUP);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  CHECK_THAT(unheard.err(), !ContainsSubstring("saved"));
  unheard.signal(SIGTERM);
  CHECK(unheard.wait() == 0);
}

TEST_CASE("a time that is no number is refused", "[faults]") {
  for (const std::string seconds : {"nan", "-1", "1s"}) {
    FaultRun run({"run", "-n", "1", "--grace-seconds", seconds, "--", "true"});
    CHECK(run.wait() == 2);
    CHECK_THAT(run.err(), ContainsSubstring("--grace-seconds: must be a number from 0 to 86400, not " + seconds));
  }
}

TEST_CASE("a place to meet that is not there is named", "[faults]") {
  struct Place {
    std::string fault;
    Arguments launcher;
    std::string words;
  };
  const TakenPort taken;
  std::string free_port;
  {
    const TakenPort gone;
    free_port = std::to_string(gone.port());
  }
  const std::vector<Place> places = {
      {"port taken",
       {"-n", "2", "--master-port", std::to_string(taken.port())},
       "MASTER_PORT " + std::to_string(taken.port()) + " is already taken"},
      {"master unreachable (timeout 1 s)",
       {"-n", "1", "--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.2", "--master-port", free_port},
       "rank 1 cannot reach rank 0 at 127.0.0.2:" + free_port},
      {"host name that does not resolve",
       {"-n", "1", "--nnodes", "2", "--node-rank", "1", "--master-addr", "no-such-host.invalid"},
       "MASTER_ADDR \"no-such-host.invalid\" does not resolve"},
      {"a world that never fills (timeout 1 s)",
       {"-n", "1", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.3", "--master-port", free_port},
       "rank 1 of 2 did not come within 1.0 s"},
  };
  for (const Place& place : places) {
    CAPTURE(place.fault);
    const FaultFolder folder;
    FaultRun run(worker_command(folder, place.launcher, {"--timeout", "1", "--backend", "shm"}));
    CHECK(run.wait() == 1);
    CHECK_THAT(run.err(), ContainsSubstring(place.words));
    CHECK(run.orphans() == std::vector<int>());
    add_row(place.fault, "one sentence with address and port, exit code 1", run.seconds());
  }
}

TEST_CASE("of two runs on one port the second is refused and the first does not notice", "[faults]") {
  std::string port;
  {
    const TakenPort gone;
    port = std::to_string(gone.port());
  }
  const FaultFolder first_folder, second_folder;
  FaultRun first(
      worker_command(first_folder, {"-n", "2", "--master-port", port}, {"--steps", "100000", "--act", "slow"}));
  const auto first_trains = [&] {
    first.signal(SIGUSR1);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return first.err().find("at step") != std::string::npos;
  };
  first_folder.pid_of(1);
  while (!first_trains()) REQUIRE(first.out().empty());
  FaultRun second(worker_command(second_folder, {"-n", "2", "--master-port", port}));
  CHECK(second.wait() == 1);
  CHECK_THAT(second.err(), ContainsSubstring("MASTER_PORT " + port + " is already taken"));
  CHECK_THAT(first.err(), !ContainsSubstring("ddpkit run: "));
  first.signal(SIGTERM);
  CHECK(first.wait() == 128 + SIGTERM);
  add_row("two runs on one port", "the second is refused, the first goes on", second.seconds());
}
