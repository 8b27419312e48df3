// Tier 0: the standard library only.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ddpkit {

/// CPU affinity of a rank. Names are those of torchrun's --numa-binding.
enum class NumaBinding {
  kNone,      ///< All cores.
  kNode,      ///< The cores of one NUMA node, shared with other ranks. No effect if there is only one node.
  kExclusive  ///< A part of a node's cores. No other rank of this launch uses them.
};

/// Options of launch().
struct LaunchOptions {
  std::vector<std::string> command;  ///< Program (searched in PATH) and its arguments.
  int ranks = 1;                     ///< Processes to start.
  /// Number of hosts of the job. Each host calls launch() and starts `ranks` processes.
  int nodes = 1;
  int node_rank = 0;  ///< Number of this host: 0 .. nodes-1.
  /// Address of host 0, for the rendezvous. Required for several hosts, as is the port.
  std::string master_addr = "127.0.0.1";
  /// Rendezvous port. 0: a free port, reserved on this host during the launch.
  int master_port = 0;
  /// Several hosts: file with the key of the store of the rendezvous; the same on all hosts. Empty: the variable
  /// DDPKIT_KEY_FILE. Without both, the store is c10d's TCPStore, which everybody who reaches the port can use. One
  /// host: launch() makes a random key.
  std::string key_file = {};
  /// Name of the run, for the ranks (TORCHELASTIC_RUN_ID) and the store. Empty: from the port, or the process ID.
  std::string run_id = {};
  /// Number of earlier starts of this job. Passed to the ranks in the environment.
  int restart_count = 0;
  int max_restarts = 0;  ///< Only passed to the ranks: launch() starts them once.
  /// Variables added to each rank's environment. They override inherited variables.
  std::vector<std::pair<std::string, std::string>> environment = {};
  NumaBinding numa_binding = NumaBinding::kNone;  ///< Cores of each rank.
  /// Time after which the ranks are killed. Empty: no limit.
  std::optional<std::chrono::milliseconds> time_limit = std::nullopt;
  /// Time between SIGTERM and SIGKILL for the other ranks after a rank has failed.
  std::chrono::milliseconds grace = std::chrono::seconds(5);
  /// Time between the signal and SIGKILL if the launcher is stopped by a signal: long enough for a checkpoint.
  std::chrono::milliseconds signal_grace = std::chrono::seconds(30);
  /// Stop the other ranks if one fails.
  bool stop_on_failure = true;
  /// Does not stop the other ranks while at least this many run: for programs that continue without a lost rank
  /// (optim::Elastic). 0: all ranks.
  int min_ranks = 0;
  /// With `min_ranks`: up to this number of lost ranks are replaced by new processes, which join the others
  /// (optim::Elastic).
  int max_replacements = 0;
  /// Receives the output of all ranks. Empty: rank 0 uses this process's stdin, stdout and stderr. The lines of the
  /// other ranks go to stderr with the prefix "[rank N] ".
  std::function<void(int rank, const std::string& text)> on_output = nullptr;
  /// Folder for copies of each rank's output: `attempt_A/RANK/stdout.log` and `stderr.log`. A is `restart_count`, or
  /// the number after the last attempt of a rank of this host in the folder: no file is overwritten. Empty: no logs.
  std::string log_dir = {};
  bool show_stdout = true;  ///< With a log folder: show stdout too.
  bool show_stderr = true;  ///< With a log folder: show stderr too.
  /// Forward SIGINT and SIGTERM to the ranks; a second signal kills them. SIGHUP is forwarded as SIGTERM, unless this
  /// process ignores it. On SIGUSR1, print the state of all ranks.
  bool forward_signals = false;
};

/// How one rank ended.
struct RankExit {
  int rank = -1;                             ///< Local rank on this host.
  int pid = -1;                              ///< Process ID.
  int exit_code = 0;                         ///< Valid if `signal` is 0.
  int signal = 0;                            ///< Signal that killed the process, or 0.
  bool before_rendezvous = false;            ///< It exited with code 0 before the rendezvous. Others waited for it.
  bool awaited = false;                      ///< It exited with code 0, or left the group, and other ranks then failed.
  bool ended_by_launcher = false;            ///< The launcher stopped it: another rank failed, signal or time limit.
  bool lost_peer = false;                    ///< It failed because a rank of another host failed.
  double seconds = 0;                        ///< Time of the end, in seconds after the start.
  std::string state = {};                    ///< Last activity in the flight recorder: "was in all_reduce …".
  std::vector<std::string> last_lines = {};  ///< Last lines of its stderr.

  /// Returns true if the process exited with code 0 and no rank waits for it.
  bool ok() const noexcept { return exit_code == 0 && signal == 0 && !before_rendezvous && !awaited; }
  /// Returns "exited with code 3", "was killed by signal 9 (SIGKILL)", "exited with code 0 before it connected to the
  /// other ranks", "exited with code 0 while the others waited for it" or "left the process group while the others
  /// waited for it".
  std::string describe() const;
};

/// A rank that did not call a collective in which other ranks timed out.
struct HungRank {
  int rank = -1;           ///< Local rank on this host.
  int pid = -1;            ///< Process ID.
  std::string state = {};  ///< As RankExit::state.
  std::string stack = {};  ///< Stack trace, innermost function first, one per line; or why there is none.
};

/// How a launch ended.
struct LaunchResult {
  std::vector<RankExit> ranks;            ///< Ranks of this host. [rank]
  int first_rank = 0;                     ///< Global rank of this host's local rank 0.
  std::optional<RankExit> first_failure;  ///< The first rank that failed and was not stopped by the launcher.
  std::vector<HungRank> hung;             ///< Ranks that did not call a collective before its timeout.
  bool timed_out = false;                 ///< The time limit stopped the ranks.
  bool ended_by_hosts = false;            ///< launch_on_hosts(): stopped, because another host or its ranks failed.
  int stopped_by_signal = 0;              ///< Signal to this process that stopped the ranks, or 0.

  /// Returns the exit code for a shell: 0; the code of the first failure (1 if that rank exited with code 0 or left
  /// while others waited for it); 128 + its signal; or 124 after the time limit.
  int exit_code() const noexcept;
  /// Returns the reason of the failure as text: the first rank that failed, when, how, its last activity and its last
  /// output. Empty if there was no failure.
  std::string summary() const;
};

}  // namespace ddpkit
