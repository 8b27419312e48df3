// The fault matrix: faults of the launcher and of the rendezvous.
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include <fmt/format.h>

#include "faults/fault_run.h"
#include "support/catch.h"
#include "support/port.h"

using namespace ddpkit::testing;
using Arguments = std::vector<std::string>;

namespace {

/// Creates a sleeping process with this process ID in a separate process group. Returns -1 without the right to choose
/// IDs, or if other processes always take the ID.
int process_with_number(int number) {
  for (int attempt = 0; attempt < 1000; ++attempt) {
    if (!(std::ofstream("/proc/sys/kernel/ns_last_pid") << number - 1 << std::flush)) return -1;
    const int pid = ::fork();
    if (pid == 0) {
      ::setpgid(0, 0);
      ::pause();
      ::_exit(0);
    }
    ::setpgid(pid, pid);
    if (pid == number) return pid;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  return -1;
}

/// Returns the process that ends the remaining ranks after the launcher was killed.
int reaper_of(int launcher) {
  std::ifstream children(fmt::format("/proc/{0}/task/{0}/children", launcher));
  for (int pid = 0; children >> pid;) {
    if (read_file(fmt::format("/proc/{}/comm", pid)) == "ddpkit-reaper\n") return pid;
  }
  return -1;
}

}  // namespace

TEST_CASE("ranks and their children end when the launcher is killed", "[faults]") {
  const FaultFolder folder;
  FaultRun run(worker_command(folder, {"-n", "2"}, {"--act", "stuck", "--victim", "1"}));
  // Waits until both ranks hold shared memory.
  while (!folder.time_of("fault")) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const double killed = now_seconds();
  run.signal(SIGKILL);
  CHECK(run.wait() == 137);
  CHECK(run.orphans() == std::vector<int>());
  CHECK(folder.memory_holders() == std::vector<int>());
  add_row("kill -9 of the launcher", "no rank outlives it", now_seconds() - killed);

  // Programs that run before the launcher has noted their start.
  for (int i = 0; i < 20; ++i) {
    FaultRun early({"run", "-n", "2", "--", "sh", "-c", "sleep 300 & kill -9 $PPID; sleep 300; :"});
    CHECK(early.wait() == 137);
    CHECK(early.orphans() == std::vector<int>());
  }

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
  // A query changes nothing: both runs continue until they receive SIGTERM.
  run.signal(SIGTERM);
  CHECK(run.wait() == 128 + SIGTERM);
  CHECK(run.orphans() == std::vector<int>());
  add_row("SIGUSR1 to the launcher", "state and stack of all ranks, which run on", answered - asked);
}

TEST_CASE("ranks that ignore SIGTERM are killed after the grace time", "[faults]") {
  FaultRun run({"run", "-n", "2", "--grace-seconds", "0.5", "--", "sh", "-c",
                "trap '' TERM; echo ready; while :; do sleep 0.05; done"});
  run.wait_for("[rank 1] ready");
  const double signalled = now_seconds();
  run.signal(SIGTERM);
  CHECK(run.wait() == 128 + SIGTERM);
  CHECK(run.orphans() == std::vector<int>());
  add_row("ranks that ignore SIGTERM (grace 0.5 s)", "killed after the grace time", now_seconds() - signalled);
}

TEST_CASE("a rank that exits with 0 before the rendezvous is named", "[faults]") {
  const FaultFolder folder;
  // The other ranks would wait for half an hour.
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
  CHECK_THAT(run.err(), ContainsSubstring(") exited with code 0 before it connected to the other ranks"));
  CHECK(run.orphans() == std::vector<int>());
  add_row("a rank exits with 0 before the rendezvous", "named, exit code 1", run.seconds());

  FaultRun again(but_rank_1({"-n", "2", "--max-restarts", "1"}, "[ $RANK = 1 ] && exit 0; "));
  CHECK(again.wait() == 1);
  CHECK_THAT(again.err(), ContainsSubstring("restarting all ranks (restart 1 of 1)"));

  // No rank waits for it: neither the ranks of a smaller world, nor ranks without a world.
  FaultRun smaller(but_rank_1({"-n", "3"},
                              "export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2; [ $RANK = 2 ] && exit 0; "
                              "[ $RANK = 1 ] && sleep 1; "));
  CHECK(smaller.wait() == 0);
  CHECK_THAT(smaller.out(), ContainsSubstring("done after 5 steps"));
  FaultRun none({"run", "-n", "2", "--", "sh", "-c", "[ $RANK = 1 ] || { sleep 1; echo slept; }"});
  CHECK(none.wait() == 0);
  CHECK(none.out() == "slept\n");
}

TEST_CASE("a process that reuses the ID of an ended rank gets no signal", "[faults]") {
  const FaultFolder folder;
  FaultRun run(
      {"run", "-n", "2", "--", "sh", "-c",
       "cd " + folder.path().string() +
           "; if [ $RANK = 0 ]; then echo $$ > pid-0; exit 0; fi; until [ -e go ]; do sleep 0.01; done; exit 3"});
  const int number = folder.pid_of(0);
  while (::kill(number, 0) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const int stranger = process_with_number(number);
  write_file(folder / "go", "");
  CHECK(run.wait() == 3);
  if (stranger < 0) {
    WARN("this test could not choose the number of a process");
    return;
  }
  int status = 0;
  CHECK(::waitpid(stranger, &status, WNOHANG) == 0);
  ::kill(stranger, SIGKILL);
  ::waitpid(stranger, nullptr, 0);
}

TEST_CASE("a launcher outlives its reaper", "[faults]") {
  const FaultFolder folder;
  FaultRun run({"run", "-n", "2", "--", "sh", "-c",
                "echo ready; until [ -e " + folder.path().string() + "/go ]; do sleep 0.01; done; exit 3"});
  run.wait_for("[rank 1] ready");
  const int reaper = reaper_of(run.pid());
  REQUIRE(reaper > 0);
  ::kill(reaper, SIGKILL);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  write_file(folder / "go", "");
  CHECK(run.wait() == 3);
  CHECK_THAT(run.err(), ContainsSubstring("exited with code 3"));
}

TEST_CASE("a program that can be executed but not read is named as the reason", "[faults]") {
  const FaultFolder folder;
  const std::string program = folder / "worker";
  std::filesystem::copy_file(DDPKIT_TEST_FAULT_WORKER, program);
  REQUIRE(::chmod(program.c_str(), 0111) == 0);
  Arguments prefix = {"env"};
  // Without these capabilities, root may not read all files and processes. Another user may not enter root's folders.
  if (::geteuid() == 0) prefix = {"setpriv", "--bounding-set=-sys_ptrace,-dac_override,-dac_read_search"};
  FaultRun run({"run", "-n", "2", "--", program, "--folder", folder.path().string(), "--steps", "5"}, prefix);
  CHECK(run.wait() == 1);
  CAPTURE(run.err());
  CHECK_THAT(run.err(), ContainsSubstring("this program is not dumpable") && ContainsSubstring("chmod +r"));
  CHECK(run.err().find("container") == std::string::npos);
}

TEST_CASE("port 0 is a free port", "[faults]") {
  FaultRun run({"run", "-n", "2", "--master-port", "0", "--", "sh", "-c", "echo port $MASTER_PORT"},
               {"env", "MASTER_PORT=29500"});
  CHECK(run.wait() == 0);
  CHECK(std::atoi(run.out().substr(5).c_str()) > 1024);
  CHECK(run.out() != "port 29500\n");
  FaultRun several({"run", "-n", "2", "--nnodes", "2", "--master-addr", "host0", "--master-port", "0", "--", "true"});
  CHECK(several.wait() == 1);
  CHECK_THAT(several.err(), ContainsSubstring("all hosts need the same port"));
}

TEST_CASE("ranks that an MPI launcher starts train together", "[faults]") {
  const FaultFolder folder;
  // Sets the variables of MPICH's Hydra. `ddpkit run` only starts the shell.
  const std::string start =
      "port=$MASTER_PORT; unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR TORCHELASTIC_RUN_ID; "
      "for r in 0 1; do PMI_RANK=$r PMI_SIZE=2 MPI_LOCALRANKID=$r MPI_LOCALNRANKS=2 MASTER_PORT=$port \"$0\" \"$@\" & "
      "done; wait";
  FaultRun run({"run", "-n", "1", "--", "sh", "-c", start, DDPKIT_TEST_FAULT_WORKER, "--folder", folder.path().string(),
                "--steps", "5", "--victim", "5"});
  CHECK(run.wait() == 0);
  CAPTURE(run.err());
  CHECK(run.out() == "done after 5 steps\n");
}

TEST_CASE("a launcher whose output is not read ends on SIGTERM", "[faults]") {
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
  const double signalled = now_seconds();
  run.signal(SIGTERM);
  CHECK(run.wait() == 128 + SIGTERM);
  CHECK(run.orphans() == std::vector<int>());
  add_row("SIGTERM while its stderr is not read", "ends after the grace time", now_seconds() - signalled);
  ::close(reader);
}

TEST_CASE("the end of a session ends the ranks, within their grace time", "[faults]") {
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
  run.signal(SIGHUP);  // The kernel and the shell may both send SIGHUP: the run ends once.
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
    CHECK_THAT(run.err(), ContainsSubstring("--grace-seconds must be a number from 0 to 86400, not '" + seconds));
  }
}

TEST_CASE("an unreachable rendezvous is named", "[faults]") {
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
       {"-n", "2", "--nnodes", "2", "--master-addr", "localhost", "--master-port", std::to_string(taken.port())},
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

TEST_CASE("two runs with one port on one host do not disturb each other", "[faults]") {
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
  CHECK(second.wait() == 0);
  CHECK(second.out() == "done after 60 steps\n");
  CHECK_THAT(first.err(), !ContainsSubstring("ddpkit run: "));
  first.signal(SIGTERM);
  CHECK(first.wait() == 128 + SIGTERM);
  add_row("two runs with one port", "both train", second.seconds());
}

TEST_CASE("with --min-ranks the others continue without a lost rank", "[faults]") {
  using Case = std::pair<std::string, std::string>;  // Backend, fault.
  for (const auto& [backend, act] :
       {Case{"shm", "kill"}, Case{"shm", "throw"}, Case{"shm", "abort"}, Case{"gloo", "kill"}, Case{"gloo", "throw"}}) {
    const FaultFolder folder;
    FaultRun run(
        worker_command(folder, {"-n", "3", "--min-ranks", "2"}, {"--elastic", "--backend", backend, "--act", act}));
    CHECK(run.wait() == 0);
    const std::string text = run.out() + run.err();
    CAPTURE(backend, act, text);
    CHECK(text.find("done after 60 steps") != std::string::npos);
    CHECK(text.find("; 2 ranks continue\n") != std::string::npos);
    CHECK(text.find("; 2 ranks continue from step 20\n") != std::string::npos);
    CHECK(run.orphans() == std::vector<int>());
    CHECK(folder.memory_holders() == std::vector<int>());
    const auto fault = folder.time_of("fault"), continued = folder.time_of("continued-1");
    REQUIRE((fault && continued));
    add_row(act + " of a rank of an elastic " + backend + " group", "the others continue", *continued - *fault);
  }
}

TEST_CASE("with --max-replacements a new process joins the others instead of a lost rank", "[faults]") {
  for (const std::string act : {"kill", "throw"}) {
    const FaultFolder folder;
    FaultRun run(worker_command(folder, {"-n", "3", "--min-ranks", "2", "--max-replacements", "1"},
                                {"--elastic", "--act", act, "--until-ranks", "3"}));
    CHECK(run.wait() == 0);
    const std::string text = run.out() + run.err();
    CAPTURE(act, text);
    CHECK(text.find("done after 60 steps") != std::string::npos);
    CHECK(text.find("; 2 ranks continue from step 20\n") != std::string::npos);
    CHECK(text.find("rank 1 (pid " + std::to_string(folder.pid_of(1)) + ") replaces the lost one (1 of 1)\n") !=
          std::string::npos);
    CHECK(text.find("; 3 ranks continue from step ") != std::string::npos);
    CHECK(run.orphans() == std::vector<int>());
    CHECK(folder.memory_holders() == std::vector<int>());
  }
}

TEST_CASE("with --min-ranks a run without enough ranks names the first lost one", "[faults]") {
  for (const Arguments& options : {Arguments{"--min-ranks", "3"}, Arguments{"--min-ranks", "1"}, Arguments{}}) {
    const FaultFolder folder;
    Arguments launcher{"-n", "3"};
    launcher.insert(launcher.end(), options.begin(), options.end());
    // In the second case, the program does not continue.
    Arguments worker{"--act", "kill"};
    if (options != Arguments{"--min-ranks", "1"}) worker.push_back("--elastic");
    FaultRun run(worker_command(folder, launcher, worker));
    const int code = run.wait();
    CAPTURE(options, run.err());
    CHECK(code == 137);
    CHECK(run.err().find("rank 1 (pid " + std::to_string(folder.pid_of(1)) + ") was killed by signal 9") !=
          std::string::npos);
    CHECK(run.orphans() == std::vector<int>());
  }
  FaultRun wrong({"run", "-n", "2", "--min-ranks", "3", "--", "true"});
  CHECK(wrong.wait() == 1);
  CHECK(wrong.err().find("at least 3 ranks cannot remain of 2") != std::string::npos);
}
