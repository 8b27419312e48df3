// Tier 0: the standard library only.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ddpkit {

/// On which cores a rank may run; names as torchrun's --numa-binding.
enum class NumaBinding {
  kNone,      ///< On all.
  kNode,      ///< On those of one NUMA node, which it shares with its neighbours. No change where there is one node.
  kExclusive  ///< On its share of a node's, which it has for itself among the ranks of this launch.
};

/// What local_launch() starts, and how.
struct LocalLaunchOptions {
  std::vector<std::string> command;  ///< Program (looked up in PATH) and its arguments.
  int ranks = 1;                     ///< Processes to start.
  /// Hosts that each start `ranks` of a job's processes, by a call like this one, and this host's number among them.
  int nodes = 1;
  int node_rank = 0;  ///< 0 .. nodes-1.
  /// Where the ranks meet: host 0. Needed with several hosts, as is the port.
  std::string master_addr = "127.0.0.1";
  /// Rendezvous port; 0 takes a free one, which nobody else on this host is given meanwhile.
  int master_port = 0;
  /// Which start of the same job this is, and how many there may be beyond the first: for the ranks' environment.
  int restart_count = 0;
  int max_restarts = 0;  ///< Only told to the ranks: local_launch() starts them once.
  /// Added to each rank's environment, over the inherited one.
  std::vector<std::pair<std::string, std::string>> environment = {};
  NumaBinding numa_binding = NumaBinding::kNone;  ///< Cores of each rank.
  /// After this the ranks are killed. Empty: no limit.
  std::optional<std::chrono::milliseconds> time_limit = std::nullopt;
  /// How long the other ranks have, after SIGTERM, when one has failed, before they are killed.
  std::chrono::milliseconds grace = std::chrono::seconds(5);
  /// The same when the launcher is told to stop: long enough for a checkpoint.
  std::chrono::milliseconds signal_grace = std::chrono::seconds(30);
  /// End the other ranks when one fails.
  bool stop_on_failure = true;
  /// Receives each rank's output instead of this process's own. Empty: rank 0 has stdin, stdout and stderr, the lines
  /// of the others go to stderr behind "[rank N] ".
  std::function<void(int rank, const std::string& text)> on_output = nullptr;
  /// Folder for each rank's output as well: `attempt_A/RANK/stdout.log` and `stderr.log`, where A is
  /// `restart_count`, or follows the last attempt that a rank of this host has left there: nothing is overwritten.
  /// Empty: none.
  std::string log_dir = {};
  /// Where there is a log folder: show what goes there.
  bool show_stdout = true;
  bool show_stderr = true;
  /// Pass SIGINT and SIGTERM on to the ranks while they run (a second one kills them), SIGHUP as SIGTERM unless this
  /// process ignores it, and print what all ranks do on SIGUSR1.
  bool forward_signals = false;
};

/// How one rank ended.
struct RankExit {
  int rank = -1;  ///< Among this host's.
  int pid = -1;
  int exit_code = 0;                         ///< Meaningful when `signal` is 0.
  int signal = 0;                            ///< Signal that killed it, 0 for none.
  bool before_meeting = false;               ///< It ended well before it met the others, who waited for it.
  bool awaited = false;                      ///< It left, with exit code 0 or without an end, and the others failed.
  bool ended_by_launcher = false;            ///< It was told to stop because of another rank, a signal or the limit.
  double seconds = 0;                        ///< When, after its start.
  std::string state = {};                    ///< What it did last, by the flight recorder: "was in all_reduce …".
  std::vector<std::string> last_lines = {};  ///< Of its stderr.

  /// It ended by itself with exit code 0, and nobody waits for it.
  bool ok() const noexcept { return exit_code == 0 && signal == 0 && !before_meeting && !awaited; }
  /// "exited with code 3", "was killed by signal 9 (SIGKILL)", "exited with code 0 before it met the others", "exited
  /// with code 0 while the others waited for it" or "left the process group while the others waited for it".
  std::string describe() const;
};

/// A rank that others waited for in vain.
struct SilentRank {
  int rank = -1;  ///< Among this host's.
  int pid = -1;
  std::string state = {};  ///< As RankExit::state.
  std::string stack = {};  ///< Its functions, innermost first, one a line; or why there are none.
};

/// How a launch ended.
struct LocalLaunchResult {
  std::vector<RankExit> ranks;            ///< Of this host. [rank]
  int first_rank = 0;                     ///< Number in the job of this host's rank 0.
  std::optional<RankExit> first_failure;  ///< The rank that failed first, by itself.
  std::vector<SilentRank> silent;         ///< Those for which a collective's time ran out.
  bool timed_out = false;                 ///< The time limit ended it.
  int stopped_by_signal = 0;              ///< The signal to this process that ended it, 0 for none.

  /// What a shell expects: 0, the first failure's code (1 for a rank that ended well or left while the others waited
  /// for it), 128 + its signal, or 124 after the time limit.
  int exit_code() const noexcept;
  /// Why it failed, in lines for a human: which rank was the first, when, how, what it did and what it said. Empty when
  /// it did not.
  std::string summary() const;
};

/// Runs `ranks` copies of a program on this host with the environment torchrun sets (RANK, LOCAL_RANK, GROUP_RANK,
/// WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID, ..._RESTART_COUNT, ..._MAX_RESTARTS),
/// OMP_NUM_THREADS = cores / ranks unless it is set, and waits for them. When one fails the others are ended. Neither
/// the ranks nor what they have started outlive this process.
/// Throws InvalidArgument when the program cannot be started, and for hosts that do not fit together.
LocalLaunchResult local_launch(const LocalLaunchOptions& options);

}  // namespace ddpkit
