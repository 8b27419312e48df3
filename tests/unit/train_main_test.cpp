#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/launch/launcher.h>
#include <ddpkit/train/stop_signal.h>

#include "support/catch.h"
#include "support/folder.h"

namespace {

struct Outcome {
  ddpkit::LaunchResult result;
  std::string text;  // Output of all ranks.
  std::vector<int> speakers;

  bool all_exited_with(int code) const {
    return std::all_of(result.ranks.begin(), result.ranks.end(),
                       [&](const auto& rank) { return rank.signal == 0 && rank.exit_code == code; });
  }
};

Outcome fail(int ranks, const std::string& how, int at_rank = -1) {
  Outcome outcome;
  outcome.result =
      ddpkit::launch({.command = {DDPKIT_TEST_FAILING_PROGRAM, "--how", how, "--at-rank=" + std::to_string(at_rank)},
                      .ranks = ranks,
                      .environment = {{"OMP_NUM_THREADS", "1"}},
                      .time_limit = std::chrono::seconds(60),
                      // Before the ranks connect, only the launcher knows that another rank has reported the error.
                      .stop_on_failure = how == "early",
                      .on_output = [&](int rank, const std::string& text) {
                        outcome.text += text;
                        outcome.speakers.push_back(rank);
                      }});
  CHECK_FALSE(outcome.result.timed_out);
  INFO(outcome.text);
  CHECK(std::count(outcome.text.begin(), outcome.text.end(), '\n') == 1);
  CHECK(outcome.text.find("Exception raised from") == std::string::npos);
  CHECK(outcome.text.find("frame #") == std::string::npos);
  return outcome;
}

// Returns the exit code of the failing program in a shell. The shell interprets `rest`.
int run_in_shell(const std::string& rest, const std::string& before = "") {
  const int status = std::system((before + "'" DDPKIT_TEST_FAILING_PROGRAM "' " + rest).c_str());
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

TEST_CASE("an error of all ranks is reported once, by rank 0", "[main]") {
  for (const char* how : {"usage", "early", "together", "alone", "torch"}) {
    CAPTURE(how);
    const Outcome outcome = fail(3, how);
    if (std::string(how) == "early")
      CHECK(outcome.result.exit_code() == 1);
    else
      CHECK(outcome.all_exited_with(std::string(how) == "usage" ? 2 : 1));
    CHECK(outcome.speakers.size() == 1);
  }
  CHECK(fail(2, "together").text == "failing: a bad file\n");
  CHECK(fail(2, "usage").text == "failing: a wrong option\n");
}

TEST_CASE("an error of one rank is reported by that rank, and ends all ranks", "[main]") {
  for (const int rank : {0, 2}) {
    CAPTURE(rank);
    for (const char* how : {"together", "alone", "torch", "out-of-range", "unknown"}) {
      CAPTURE(how);
      const Outcome outcome = fail(3, how, rank);
      CHECK(outcome.all_exited_with(1));
      CHECK(outcome.speakers == std::vector<int>{rank});
    }
  }
  CHECK(fail(2, "torch", 1).text == "failing: torch does not like this\n");
  CHECK(fail(2, "gpu-memory", 1).text ==
        "failing: cuda:2 is out of memory (4.25 GiB wanted, 1.10 GiB free): reduce --batch-size (2048) or raise "
        "--grad-accum-steps\n");
  CHECK(fail(1, "cpu-memory").text ==
        "failing: out of memory (140737488355328 bytes wanted): reduce --batch-size (2048) or raise "
        "--grad-accum-steps\n");
  CHECK(fail(1, "memory").text == "failing: out of memory: reduce --batch-size (2048) or raise --grad-accum-steps\n");
}

TEST_CASE("a rank that was killed is named by one of the others", "[main]") {
  for (const int rank : {0, 1}) {
    CAPTURE(rank);
    const Outcome outcome = fail(3, "killed", rank);
    CHECK_THAT(outcome.text, ContainsSubstring("rank " + std::to_string(rank)));
    CHECK(outcome.speakers.size() == 1);
    CHECK(outcome.result.ranks[static_cast<std::size_t>(rank)].signal == 9);
    CHECK(outcome.result.ranks[2].exit_code == 1);
  }
}

TEST_CASE("ranks that call different collectives report it once", "[main]") {
  const Outcome outcome = fail(2, "mismatch", 1);
  CHECK(outcome.all_exited_with(1));
  CHECK(outcome.speakers.size() == 1);
}

TEST_CASE("what is printed goes into no file, though stdin, stdout or stderr is closed", "[main]") {
  const ddpkit::testing::Folder folder;
  for (const char* closed : {"<&-", ">&-", "2>&-", "<&- >&- 2>&-"}) {
    CAPTURE(closed);
    const std::string file = folder / "data";
    CHECK(run_in_shell("--how prints --file '" + file + "' >/dev/null 2>/dev/null " + closed) == 0);
    CHECK(ddpkit::testing::read_file(file) == "data");
  }
}

TEST_CASE("a full stdout is an error, a full stderr is none", "[main]") {
  const ddpkit::testing::Folder folder;
  const std::string errors = folder / "errors";
  for (const char* arguments : {"--how prints", "--help"}) {
    CAPTURE(arguments);
    CHECK(run_in_shell(arguments + std::string(" >/dev/full 2>'") + errors + "'") == 1);
    CHECK_THAT(ddpkit::testing::read_file(errors), ContainsSubstring("failing: cannot write to stdout\n"));
    CHECK(run_in_shell(arguments + std::string(" >/dev/full 2>/dev/full")) == 1);
  }
  CHECK(run_in_shell("--how prints >/dev/null 2>/dev/full") == 0);
  CHECK(run_in_shell("--how usage 2>/dev/full") == 2);
  CHECK(run_in_shell("--nope 2>/dev/full") == 2);
  CHECK(run_in_shell("--how early 2>/dev/full") == 1);
}

TEST_CASE("a limit on a file's size is reported", "[main]") {
  const ddpkit::testing::Folder folder;
  const std::string errors = folder / "errors", file = folder / "large";
  CHECK(run_in_shell("--how writes --file '" + file + "' 2>'" + errors + "'", "ulimit -f 16; ") == 1);
  CHECK_THAT(ddpkit::testing::read_file(errors),
             ContainsSubstring("failing: cannot write " + file) && ContainsSubstring("File too large"));
  CHECK(ddpkit::testing::names_in(folder.path()) == std::vector<std::string>{"errors"});
}

TEST_CASE("a terminal that goes stops a training, unless it was started to outlive it", "[main]") {
  const auto group = ddpkit::init_process_group();
  {
    ::signal(SIGHUP, SIG_IGN);
    ddpkit::train::StopSignal stop(group);
    ::raise(SIGHUP);
    CHECK_FALSE(stop.requested());
  }
  ::signal(SIGHUP, SIG_DFL);
  ddpkit::train::StopSignal stop(group);
  CHECK_FALSE(stop.requested());
  ::raise(SIGHUP);
  CHECK(stop.requested());
  CHECK_THAT(stop.describe(7, "runs/1"),
             ContainsSubstring("stopped by SIGHUP after step 7; resume with --save-dir runs/1"));
  CHECK_THAT(stop.describe(7, ""), ContainsSubstring("; no checkpoint was saved"));
}
