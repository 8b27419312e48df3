#include <ddpkit/launch/launcher.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <thread>

#include <ddpkit/error.h>

#include "comm/store/store_key.h"
#include "launch/rank_process.h"
#include "launch/report.h"
#include "store_door.h"
#include "support/catch.h"
#include "support/folder.h"

using ddpkit::LaunchResult;
using ddpkit::testing::Folder;
using ddpkit::testing::read_file;

namespace {

struct Run {
  LaunchResult result;
  std::map<int, std::string> output;
};

Run run(int ranks, const std::string& script, std::optional<std::chrono::milliseconds> limit = {}) {
  Run run;
  run.result = ddpkit::launch({.command = {"sh", "-c", script},
                               .ranks = ranks,
                               .time_limit = limit,
                               .grace = std::chrono::milliseconds(500),
                               .on_output = [&](int rank, const std::string& text) { run.output[rank] += text; }});
  return run;
}

}  // namespace

TEST_CASE("every rank gets torchrun's environment", "[launch]") {
  const Run three = run(3, "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR; echo $MASTER_PORT >&2");
  CHECK(three.result.exit_code() == 0);
  for (int rank = 0; rank < 3; ++rank) {
    const std::string number = std::to_string(rank);
    CHECK_THAT(three.output.at(rank), ContainsSubstring(number + " " + number + " 3 3 127.0.0.1\n"));
  }
}

TEST_CASE("a rank of an earlier launch cannot join the next one", "[launch][store]") {
  using namespace ddpkit::store;
  std::optional<StorePass> earlier, later;
  const auto launch = [](std::optional<StorePass>& pass, int restart, const std::function<void()>& while_running) {
    const Folder folder;
    const std::string end = folder / "end";
    const auto result = ddpkit::launch(
        {.command = {"sh", "-c", "echo $$ $DDPKIT_KEY_FD; while [ ! -e " + end + " ]; do sleep 0.01; done"},
         .restart_count = restart,
         .on_output = [&](int, const std::string& text) {
           int pid = 0, fd = -1;
           if (std::sscanf(text.c_str(), "%d %d", &pid, &fd) != 2) return;
           const int copy = ::open(("/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd)).c_str(), O_RDONLY);
           pass = read_pass(copy);
           ::close(copy);
           while_running();
           ddpkit::testing::write_file(end, "");
         }});
    CHECK(result.exit_code() == 0);
  };
  const auto join = [&](const StorePass& pass) {
    const StorePlace place{
        .address = ddpkit::testing::loopback(later->port), .name = "later", .key = pass.key, .run = pass.run};
    return c10::make_intrusive<KeyedStore>(place, std::chrono::seconds(60));
  };
  launch(earlier, 0, [] {});
  launch(later, 1, [&] {
    REQUIRE((earlier && later));
    join(*later)->set("a", "1");
    CHECK_THROWS_WITH(join(*earlier), ContainsSubstring("its key is not the key of the store"));
    StorePass mixed = *later;
    mixed.run = earlier->run;
    CHECK_THROWS_WITH(join(mixed), ContainsSubstring("it belongs to the run \"" + earlier->run));
    CHECK(join(*later)->getNumKeys() == 1);
  });
}

TEST_CASE("the ranks of several hosts are numbered through", "[launch]") {
  std::string output;
  const auto result = ddpkit::launch(
      {.command = {"sh", "-c", "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT"},
       .ranks = 1,
       .nodes = 3,
       .node_rank = 2,
       .master_addr = "host0",
       .master_port = 4321,
       .on_output = [&](int, const std::string& text) { output += text; }});
  CHECK(result.exit_code() == 0);
  CHECK(output == "2 0 3 1 host0 4321\n");
  CHECK_THROWS_WITH(ddpkit::launch({.command = {"true"}, .nodes = 2}), ContainsSubstring("2 hosts need"));
  CHECK_THROWS_WITH(ddpkit::launch({.command = {"true"}, .nodes = 2, .node_rank = 2}),
                    ContainsSubstring("no host 2 among 2"));
}

TEST_CASE("a failing rank ends the others and is named", "[launch]") {
  const Run failed = run(3, "if [ $RANK = 1 ]; then exit 7; fi; exec sleep 60");
  CHECK(failed.result.exit_code() == 7);
  REQUIRE(failed.result.first_failure.has_value());
  CHECK(failed.result.first_failure->rank == 1);
  CHECK(failed.result.first_failure->describe() == "exited with code 7");
  CHECK(failed.result.ranks[0].ended_by_launcher);
}

TEST_CASE("a rank killed by a signal is reported with the signal", "[launch]") {
  const Run killed = run(2, "if [ $RANK = 0 ]; then kill -9 $$; fi; exec sleep 60");
  CHECK(killed.result.exit_code() == 128 + SIGKILL);
  CHECK(killed.result.first_failure->describe() == "was killed by signal 9 (SIGKILL)");
}

TEST_CASE("a rank that ignores SIGTERM is killed after the grace time", "[launch]") {
  const Folder folder;
  const std::string ready = folder / "ready";  // Rank 1 fails after rank 0 ignores the signal.
  const Run stubborn = run(2, "if [ $RANK = 1 ]; then while [ ! -e " + ready + " ]; do sleep 0.05; done; exit 3; fi; " +
                                  "trap '' TERM; touch " + ready + "; while :; do sleep 0.05; done");
  CHECK(stubborn.result.exit_code() == 3);
  CHECK(stubborn.result.ranks[0].signal == SIGKILL);
}

TEST_CASE("the time limit ends ranks that hang", "[launch]") {
  const Run hung = run(2, "exec sleep 60", std::chrono::milliseconds(200));
  CHECK(hung.result.timed_out);
  CHECK(hung.result.exit_code() == 124);
}

TEST_CASE("a further launch leaves the logs of earlier ones alone", "[launch]") {
  const Folder logs;
  const auto launch = [&](int first_rank, const std::string& word, int restart = 0) {
    const auto result = ddpkit::launch({.command = {"sh", "-c", "echo " + word},
                                        .ranks = 2,
                                        .nodes = 2,
                                        .node_rank = first_rank / 2,
                                        .master_addr = "host0",
                                        .master_port = 4321,
                                        .restart_count = restart,
                                        .on_output = [](int, const std::string&) {},
                                        .log_dir = logs.path().string()});
    REQUIRE(result.exit_code() == 0);
  };
  launch(0, "first");
  launch(2, "beside");  // Another host's ranks of the same attempt, on a file system that both see.
  launch(0, "second");
  launch(0, "restarted", 1);
  launch(2, "fifth", 5);
  CHECK(read_file(logs / "attempt_0/1/stdout.log") == "first\n");
  CHECK(read_file(logs / "attempt_0/2/stdout.log") == "beside\n");
  CHECK(read_file(logs / "attempt_1/1/stdout.log") == "second\n");
  CHECK(read_file(logs / "attempt_2/0/stdout.log") == "restarted\n");
  CHECK(read_file(logs / "attempt_5/3/stdout.log") == "fifth\n");
}

TEST_CASE("a program that does not exist is an error", "[launch]") {
  CHECK_THROWS_WITH(ddpkit::launch({.command = {"/no/such/program"}, .ranks = 2}),
                    ContainsSubstring("/no/such/program"));
  CHECK_THROWS_AS(ddpkit::launch({.command = {"true"}, .ranks = 0}), ddpkit::InvalidArgument);
}

TEST_CASE("the rank that others lost is the first failure, whichever ends first", "[launch]") {
  using ddpkit::FailureKind;
  using ddpkit::launcher::Evidence;
  using Ranks = std::vector<std::size_t>;
  const auto suspects = ddpkit::launcher::suspects;
  const Evidence trains;
  const auto lost = [](std::optional<std::size_t> failed_rank) {
    return Evidence{
        .failure = FailureKind::kPeerLost, .failed_rank = failed_rank, .running = false, .ended_independently = true};
  };
  const Evidence left = {.has_left = true};
  const Evidence failed = {.running = false, .has_left = true, .ended_independently = true};
  const Evidence ended_well = {.running = false, .ended_independently = true, .ended_well = true};
  const Evidence aborted = {.failure = FailureKind::kAborted, .failed_rank = 1};
  // No rank is blamed.
  CHECK(suspects(0, {failed, trains}, {0}) == Ranks{});
  // The blamed rank is known, whether it has ended or not.
  CHECK(suspects(0, {lost(1), left}, {0}) == Ranks{1});
  CHECK(suspects(0, {lost(1), failed}, {0, 1}) == Ranks{1});
  CHECK(suspects(0, {lost(1), ended_well}, {1, 0}) == Ranks{1});
  CHECK(suspects(0, {lost(1), aborted}, {0}) == Ranks{1});
  // The blamed rank blames another rank.
  CHECK(suspects(0, {lost(1), lost(2), left}, {0, 1}) == Ranks{2});
  // The ranks blame each other.
  CHECK(suspects(1, {lost(1), lost(0)}, {1, 0}) == Ranks{});
  // The backend blames no rank. A failure ranks before an exit; a rank that still runs in the group is never a suspect.
  CHECK(suspects(0, {lost({}), trains, left}, {0}) == Ranks{2});
  CHECK(suspects(0, {lost({}), failed, ended_well}, {2, 0, 1}) == Ranks{1});
  CHECK(suspects(0, {lost({}), lost({}), ended_well}, {2, 0, 1}) == Ranks{2});
  CHECK(suspects(0, {lost({}), trains}, {0}) == Ranks{});
  // A rank that still runs is no suspect if others waited too long for it.
  CHECK(suspects(0, {Evidence{.failure = FailureKind::kTimeout, .failed_rank = 1}, trains}, {0}) == Ranks{});
}

TEST_CASE("ranks are reaped in the order of their ends", "[launch]") {
  // The ranks end before the launcher checks.
  ddpkit::launcher::EndOrder order;
  std::vector<int> children, descriptors;
  for (std::size_t rank = 0; rank < 3; ++rank) {
    const int pid = ::fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200 - 100 * (rank % 2)));
      if (rank == 2) ::pause();
      ::_exit(0);
    }
    children.push_back(pid);
    descriptors.push_back(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    order.add(descriptors.back(), rank);
  }
  siginfo_t end{};
  for (const std::size_t rank : {0, 1}) ::waitid(P_PID, static_cast<id_t>(children[rank]), &end, WEXITED | WNOWAIT);
  if (descriptors[0] >= 0) CHECK(order.ended() == std::vector<std::size_t>{1, 0});
  ::kill(children[2], SIGKILL);
  for (const int child : children) ::waitpid(child, nullptr, 0);
  for (const int descriptor : descriptors) ::close(descriptor);
}
