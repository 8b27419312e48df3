// Runs trainers and captures their output.
#pragma once

#include <ATen/core/Tensor.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/launch/launcher.h>
#include <ddpkit/train/checkpoint.h>

#include "support/catch.h"
#include "support/folder.h"

namespace ddpkit::testing {

using Arguments = std::vector<std::string>;

struct ProgramRun {
  int exit_code = -1;
  std::vector<std::string> lines;  ///< Lines of rank 0's stdout.
  std::string errors;              ///< stderr of all ranks, and stdout of the other ranks.
  double seconds = 0;              ///< Duration of the run.

  nlohmann::json json(std::size_t line) const { return nlohmann::json::parse(lines.at(line)); }
};

/// Sends a signal (SIGKILL by default) to a rank some time after its start.
struct Kill {
  int rank = 0;
  double after_seconds = 1;
  int signal = SIGKILL;
  /// If set: kills as soon as this file has been rewritten, instead of after a time.
  const std::filesystem::path* at_write_of = nullptr;
};

/// Runs in a temporary folder, under a launcher with `ranks` ranks; without a launcher for 0 ranks.
inline ProgramRun run_program(const std::string& program, int ranks, const Arguments& arguments,
                              std::optional<Kill> kill = std::nullopt) {
  const Folder folder;
  const std::string errors = (folder / "errors").string();
  std::string script = fmt::format("NAME=${{RANK:-0}}; cd '{}'; ", folder.path().string());
  if (ranks == 0) script += "unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT; ";
  if (kill && kill->at_write_of) {
    write_file(folder / "start", "");
    script += fmt::format(
        "[ $RANK = {} ] && (until [ '{}' -nt '{}' ]; do sleep 0.002; kill -0 $$ || exit; done; kill -s {} $$) "
        ">/dev/null 2>&1 & ",
        kill->rank, kill->at_write_of->string(), (folder / "start").string(), kill->signal);
  } else if (kill) {
    script += fmt::format("[ $RANK = {} ] && set -- timeout --preserve-status -s {} {} \"$@\"; ", kill->rank,
                          kill->signal, kill->after_seconds);
  }
  Arguments command = {"sh", "-c", script + R"(exec "$@" 2> ")" + errors + R"(-$NAME")", "sh", program};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::string output;
  ProgramRun run;
  const auto start = std::chrono::steady_clock::now();
  const LaunchResult result = ddpkit::launch(
      {.command = command,
       .ranks = std::max(1, ranks),
       .environment = {{"OMP_NUM_THREADS", "1"}},
       .time_limit = std::chrono::seconds(200),
       .on_output = [&](int rank, const std::string& text) { (rank == 0 ? output : run.errors) += text; }});
  run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  REQUIRE_FALSE(result.timed_out);
  run.exit_code = result.exit_code();
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) run.lines.push_back(line);
  for (int rank = 0; rank < std::max(1, ranks); ++rank) run.errors += read_file(errors + "-" + std::to_string(rank));
  return run;
}

/// Returns whether the checkpoint is from within an epoch of `steps` steps.
inline bool is_within_epoch(const std::filesystem::path& checkpoint, std::int64_t steps) {
  return std::filesystem::exists(checkpoint) && train::read_checkpoint_info(checkpoint).step % steps != 0;
}

struct KilledRuns {
  int kills = 0;
  ProgramRun last;  ///< The run that was not killed.
};

/// Returns the time of the `number`-th disturbance, in seconds from the start of the run. The times increase, as shares
/// of the duration of `whole` on this machine: fast runs are disturbed, and slow runs finish.
inline double disturbed_after(const ProgramRun& whole, int number) { return whole.seconds * (0.3 + 0.12 * number); }

/// Starts `run` on `ranks` ranks repeatedly. Kills another rank each time, later each time, until the run finishes.
/// With `checkpoint`, the first kills come as soon as that file has been written. Calls `after_kill` after each kill.
inline KilledRuns run_until_not_killed(int ranks, const ProgramRun& whole,
                                       const std::function<ProgramRun(const Kill&)>& run,
                                       const std::function<void()>& after_kill = {},
                                       const std::filesystem::path& checkpoint = {}) {
  constexpr int kKillsAtCheckpoints = 4;
  for (KilledRuns runs;; ++runs.kills) {
    REQUIRE(runs.kills < 40);
    const bool is_at_checkpoint = !checkpoint.empty() && runs.kills < kKillsAtCheckpoints;
    const int kills_by_time = checkpoint.empty() ? runs.kills : std::max(0, runs.kills - kKillsAtCheckpoints);
    runs.last = run({.rank = runs.kills % ranks,
                     .after_seconds = disturbed_after(whole, kills_by_time),
                     .at_write_of = is_at_checkpoint ? &checkpoint : nullptr});
    if (runs.last.exit_code == 0) return runs;
    if (after_kill) after_kill();
  }
}

/// Returns whether the line reports a part of a training.
inline bool is_report(const std::string& line) {
  return line.starts_with("Epoch ") || line.starts_with("Round ") || line.starts_with("{");
}

/// Checks that the program exits with `code` and prints one sentence, once.
inline void check_program_refuses(const std::string& program, const Arguments& arguments, int code,
                                  const std::string& message, const std::vector<int>& worlds = {1}) {
  for (const int ranks : worlds) {
    CAPTURE(arguments, ranks);
    const ProgramRun run = run_program(program, ranks, arguments);
    CHECK(run.exit_code == code);
    CHECK_THAT(run.errors, ContainsSubstring(message));
    CHECK(std::count(run.errors.begin(), run.errors.end(), '\n') == 1);
    CHECK(std::none_of(run.lines.begin(), run.lines.end(), is_report));
  }
}

inline Arguments joined(Arguments a, const Arguments& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

inline bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) { return x.equal(y); });
}

}  // namespace ddpkit::testing
