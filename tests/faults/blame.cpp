#include "faults/blame.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include <fmt/format.h>

#include "faults/fault_run.h"
#include "support/catch.h"

namespace ddpkit::testing {
namespace {

/// Processes that compete with the ranks for all cores.
class Load {
 public:
  Load() {
    const pid_t parent = ::getpid();
    for (long i = 0; i < 2 * ::sysconf(_SC_NPROCESSORS_ONLN); ++i) {
      const pid_t pid = ::fork();
      if (pid == 0) {
        while (::getppid() == parent) {
        }
        ::_exit(0);
      }
      if (pid > 0) pids_.push_back(pid);
    }
  }
  ~Load() {
    for (const pid_t pid : pids_) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }
  Load(const Load&) = delete;
  Load& operator=(const Load&) = delete;

 private:
  std::vector<pid_t> pids_;
};

/// Returns the first number of a file.
double number_in(const std::filesystem::path& file) {
  double number = 0;
  std::ifstream(file) >> number;
  return number;
}

/// Returns the fault of the report, or an empty string.
std::string wrong_in(const Way& way, const std::string& backend, int victim, int ranks) {
  const FaultFolder folder;
  const double started = now_seconds();
  FaultRun run({"run", "-n", std::to_string(ranks), "--", DDPKIT_TEST_DEATH, folder.path().string(), way.name, backend,
                std::to_string(victim)});
  const std::optional<int> code = run.ended_within(std::chrono::seconds(120));
  const std::string err = run.err();
  if (!code) return "it hangs: " + err;
  std::string pid;
  std::ifstream(folder / fmt::format("pid-{}", victim)) >> pid >> pid;
  const std::string words = fmt::format("ddpkit run: rank {} (pid {}) {}, ", victim, pid, way.words);
  const auto at = err.find(words);
  if (at == std::string::npos || err.find("ddpkit run: ") != err.rfind("ddpkit run: "))
    return fmt::format("not named: {}", err);
  if (*code != way.exit_code) return fmt::format("exit code {}: {}", *code, err);
  // Seconds since the launcher's start, rounded to 0.1: after the fault, before the launcher's end.
  const double seconds = std::atof(err.c_str() + at + words.size());
  double first_rank = number_in(folder / "pid-0");
  for (int rank = 1; rank < ranks; ++rank)
    first_rank = std::min(first_rank, number_in(folder / fmt::format("pid-{}", rank)));
  const double least = number_in(folder / "fault") - first_rank, most = run.ended_at() - started;
  if (seconds < least - 0.05 || seconds > most + 0.05)
    return fmt::format("{} s is not between {:.2f} and {:.2f}: {}", seconds, least, most, err);
  return run.orphans().empty() ? "" : "processes are left";
}

}  // namespace

const std::vector<Way> kWays = {
    {"return", 1, "exited with code 1"},
    {"throw", 1, "exited with code 1"},
    {"_exit", 3, "exited with code 3"},
    {"signal", 139, "was killed by signal 11 (SIGSEGV)"},
    {"out-of-memory", 137, "was killed by signal 9 (SIGKILL)"},
    {"exit-0", 1, "exited with code 0 while the others waited for it"},
};

void check_blame(const Way& way, const std::string& backend, int runs) {
  const Load load;
  int right = 0;
  for (int run = 0; run < runs; ++run) {
    const int ranks = run % 5 == 4 ? 4 : 2;
    const std::string wrong = wrong_in(way, backend, run % 2, ranks);
    right += wrong.empty() ? 1 : 0;
    INFO(fmt::format("{} on {}, run {}, {} ranks", way.name, backend, run, ranks));
    if (!wrong.empty()) UNSCOPED_INFO(wrong);
    CHECK(wrong.empty());
  }
  fmt::print("{:<14} {:<5} {} of {} runs name the rank, its end and the time\n", way.name, backend, right, runs);
  std::fflush(stdout);
}

}  // namespace ddpkit::testing
