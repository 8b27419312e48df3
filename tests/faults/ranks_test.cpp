// The fault matrix: faults in a rank.
#include <algorithm>

#include <fmt/format.h>

#include "faults/fault_run.h"
#include "support/catch.h"

using namespace ddpkit::testing;

namespace {

/// Checks that nothing of the run remains: no process, no shared memory, and in its folder only the files of the
/// worker.
void check_clean(const FaultRun& run, const FaultFolder& folder) {
  CHECK(run.orphans() == std::vector<int>());
  CHECK(folder.memory_holders() == std::vector<int>());
  for (const std::string& name : names_in(folder.path())) {
    CAPTURE(name);
    CHECK((name == "fault" || name.starts_with("named-") || name.starts_with("pid-") || name.starts_with("memory-")));
  }
}

/// Returns the ranks in the launcher's summary, in order.
std::vector<int> blamed(const FaultRun& run) {
  const std::string text = run.err(), words = "ddpkit run: rank ";
  std::vector<int> ranks;
  for (std::size_t at = 0; (at = text.find(words, at)) != std::string::npos;)
    ranks.push_back(std::atoi(text.c_str() + (at += words.size())));
  return ranks;
}

struct Death {
  std::string act;
  int victim;
  int exit_code;
  std::string words;  ///< The summary's text about the victim.
};

}  // namespace

TEST_CASE("a rank that dies is named by the launcher, with what it did", "[faults]") {
  const std::vector<Death> deaths = {
      {"kill", 0, 137, "was killed by signal 9 (SIGKILL)"},
      {"kill", 1, 137, "was killed by signal 9 (SIGKILL)"},
      {"kill-in-all-reduce", 0, 137, "was killed by signal 9 (SIGKILL)"},
      {"kill-in-all-reduce", 1, 137, "was killed by signal 9 (SIGKILL)"},
      {"kill-before-rendezvous", 0, 137, "was killed by signal 9 (SIGKILL)"},
      {"kill-before-rendezvous", 1, 137, "was killed by signal 9 (SIGKILL)"},
      {"kill-at-exit", 1, 137, "was killed by signal 9 (SIGKILL)"},
      {"abort", 1, 134, "was killed by signal 6 (SIGABRT)"},
      {"segfault", 1, 139, "was killed by signal 11 (SIGSEGV)"},
      {"throw", 1, 1, "exited with code 1"},
      {"out-of-memory", 1, 1, "exited with code 1"},
  };
  for (const Death& death : deaths) {
    CAPTURE(death.act, death.victim);
    const FaultFolder folder;
    FaultRun run(worker_command(folder, {"-n", "2"}, {"--act", death.act, "--victim", std::to_string(death.victim)}));
    CHECK(run.wait() == death.exit_code);
    CAPTURE(run.out(), run.err());
    const std::string first =
        fmt::format("ddpkit run: rank {} (pid {}) {}", death.victim, folder.pid_of(death.victim), death.words);
    CHECK_THAT(run.err(), ContainsSubstring(first));
    CHECK(blamed(run) == std::vector<int>{death.victim});
    const bool trained = death.act == "kill" || death.act == "abort" || death.act == "segfault";
    if (trained) CHECK_THAT(run.err(), ContainsSubstring("at step 20; its last one was"));
    // The other rank ended before it noticed the fault, or it knows the failed rank.
    if (const std::string other = folder.text_of(fmt::format("named-{}", 1 - death.victim)); !other.empty())
      CHECK_THAT(other, ContainsSubstring(fmt::format("rank {}", death.victim)));
    if (death.act == "kill-in-all-reduce") CHECK_THAT(run.err(), ContainsSubstring("all_reduce number"));
    if (death.act == "throw") CHECK_THAT(run.err(), ContainsSubstring("worker: thrown on purpose"));
    check_clean(run, folder);
    add_row(fmt::format("{}, rank {}", death.act, death.victim), "named, the others ended, exit code as its own",
            folder.ended_after(run));
  }
}

TEST_CASE("ranks whose calls differ get an error at once", "[faults]") {
  struct Difference {
    std::string act, words;
  };
  const std::vector<Difference> differences = {
      {"exit-early", "rank 1"},
      {"extra", "do not match"},
      {"other-shape", "all_reduce(sum) of 3 float32"},
      {"other-dtype", "all_reduce(sum) of 4 float64"},
      {"other-model", "rank 1"},
      {"parameter-less", "rank 1"},
  };
  for (const Difference& difference : differences) {
    CAPTURE(difference.act);
    const FaultFolder folder;
    FaultRun run(worker_command(folder, {"-n", "2"}, {"--act", difference.act, "--victim", "1"}));
    CHECK(run.wait() == 1);
    CAPTURE(run.err());
    CHECK_THAT(folder.text_of("named-0"), ContainsSubstring(difference.words));
    check_clean(run, folder);
    const auto after = folder.named_after(0);
    add_row(difference.act + ", rank 1", "one sentence with both calls or the rank, exit code 1",
            after ? *after : run.seconds());
  }
}

TEST_CASE("a rank that returns an error from main, and ends slowly, is named", "[faults]") {
  const FaultFolder folder;
  FaultRun run(worker_command(folder, {"-n", "2"}, {"--act", "return-slowly", "--victim", "1"}));
  CHECK(run.wait() == 1);
  CHECK(blamed(run) == std::vector<int>{1});
  CHECK_THAT(run.err(), ContainsSubstring(") exited with code 1, "));
}

TEST_CASE("a rank that exits early with code 0 is named", "[faults]") {
  const FaultFolder folder;
  FaultRun run(worker_command(folder, {"-n", "2"}, {"--act", "exit-early", "--victim", "1"}));
  CHECK(run.wait() == 1);
  CHECK(blamed(run) == std::vector<int>{1});
  CHECK_THAT(run.err(), ContainsSubstring(") exited with code 0 while the others waited for it, "));
}

TEST_CASE("a rank that leaves the group and does not end is named, and ended after the grace time", "[faults]") {
  const FaultFolder folder;
  FaultRun run(worker_command(folder, {"-n", "2", "--grace-seconds", "0.5"}, {"--act", "leave", "--victim", "1"}));
  CHECK(run.wait() == 1);
  CHECK(blamed(run) == std::vector<int>{1});
  CHECK_THAT(run.err(), ContainsSubstring(") left the process group while the others waited for it, "));
  check_clean(run, folder);
}

TEST_CASE("a silent rank is named with its stack when the timeout ends", "[faults]") {
  for (const std::string act : {"stuck", "stop"}) {
    CAPTURE(act);
    const FaultFolder folder;
    FaultRun run(worker_command(folder, {"-n", "2", "--grace-seconds", "0.5"},
                                {"--act", act, "--victim", "1", "--timeout", "1"}));
    CHECK(run.wait() == 1);
    CAPTURE(run.err());
    CHECK_THAT(folder.text_of("named-0"), ContainsSubstring("for rank 1: rank 1 (pid"));
    CHECK_THAT(run.err(), ContainsSubstring("waited for:"));
    CHECK_THAT(run.err(),
               ContainsSubstring(fmt::format("rank 1 (pid {}) is in no collective at step 20", folder.pid_of(1))));
    CHECK_THAT(run.err(), ContainsSubstring(act == "stuck" ? "stuck_on_purpose" : "is stopped (SIGSTOP)"));
    CHECK_THAT(run.err(), ContainsSubstring("bucket 0"));
    check_clean(run, folder);
    add_row(act + ", rank 1 (timeout 1 s)", "named with stack, step, last collective, bucket",
            folder.named_after(0).value_or(-1));
  }
}

TEST_CASE("a bad or slow rank harms nobody more than it must", "[faults]") {
  const FaultFolder nan_folder;
  FaultRun nan_run(worker_command(nan_folder, {"-n", "2"}, {"--act", "nan", "--victim", "1"}));
  CHECK(nan_run.wait() == 1);
  // The same on both ranks: no rank continues with different weights.
  CHECK_THAT(nan_folder.text_of("named-0"), ContainsSubstring("nan"));
  check_clean(nan_run, nan_folder);
  add_row("NaN gradient on rank 1", "all ranks refuse the step alike", nan_folder.named_after(0).value_or(-1));

  for (const auto& [act, ranks] : {std::pair("slow", 2), std::pair("none", 16)}) {
    CAPTURE(act, ranks);
    const FaultFolder folder;
    FaultRun run(worker_command(folder, {"-n", std::to_string(ranks)}, {"--act", act, "--victim", "1"}));
    CHECK(run.wait(std::chrono::seconds(120)) == 0);
    CAPTURE(run.err());
    CHECK_THAT(run.out(), ContainsSubstring("done after 60 steps"));
    check_clean(run, folder);
    add_row(ranks == 2 ? "rank 1 ten times slower, 60 steps" : fmt::format("{} ranks on this host, 60 steps", ranks),
            "only slower: exit code 0", run.seconds());
  }
}
