#include <ddpkit/comm/local_launch.h>

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/comm/error.h>

#include "comm/flight/view.h"
#include "comm/launch/cores.h"
#include "comm/launch/guardian.h"
#include "comm/launch/port.h"
#include "comm/launch/rank_output.h"
#include "comm/launch/rank_process.h"
#include "comm/launch/signal_notes.h"
#include "comm/launch/summary.h"

extern char** environ;

namespace ddpkit {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// How long a rank may take to write its stack.
constexpr milliseconds kStackLimit(500);
/// Between two looks at what the ranks record.
constexpr milliseconds kLook(250);
/// A kernel without pidfds: between two looks whether a rank has ended.
constexpr milliseconds kLookForEnds(10);
/// Ranks that end within this of the first failure may have failed before it.
constexpr milliseconds kAtOnce(20);

class Launch {
 public:
  explicit Launch(const LocalLaunchOptions& options)
      : options_(options), signals_(options.forward_signals), output_(options, [this] { return goes_on(); }) {
    result_.ranks.resize(static_cast<std::size_t>(options.ranks));
    result_.first_rank = options.node_rank * options.ranks;
  }

  LocalLaunchResult run() {
    if (options_.master_port == 0) port_.emplace();
    cores_ = launch::divide_cores(launch::numa_nodes(launch::allowed_cores()), options_.ranks, options_.numa_binding);
    for (int rank = 0; rank < options_.ranks; ++rank) start(rank);
    while (running() > 0 || waits_for_others() || !output_.empty()) {
      wait();
      attend();
      if (std::exchange(asked_for_states_, false)) print_states();
      // Processes that have left their rank's group may hold its output open: they are not waited for.
      if (running() == 0 && !waits_for_others()) {
        if (!close_at_) close_at_ = Clock::now() + milliseconds(500);
        if (Clock::now() > *close_at_) output_.close_all();
      }
    }
    for (RankExit& end : result_.ranks) end.last_lines = output_.last_lines(end.rank);
    name_first_failure();
    return std::move(result_);
  }

 private:
  int port() const { return port_ ? port_->number() : options_.master_port; }

  std::vector<std::string> environment_of(int rank, int page) const {
    std::map<std::string, std::string> variables;
    for (char** at = environ; *at; ++at) {
      const std::string entry = *at;
      const auto equals = entry.find('=');
      if (equals != std::string::npos) variables[entry.substr(0, equals)] = entry.substr(equals + 1);
    }
    const std::string ranks = std::to_string(options_.ranks);
    variables["RANK"] = std::to_string(result_.first_rank + rank);
    variables["LOCAL_RANK"] = std::to_string(rank);
    variables["GROUP_RANK"] = std::to_string(options_.node_rank);
    variables["WORLD_SIZE"] = std::to_string(options_.nodes * options_.ranks);
    variables["LOCAL_WORLD_SIZE"] = ranks;
    variables["MASTER_ADDR"] = options_.master_addr;
    variables["MASTER_PORT"] = std::to_string(port());
    // The same on all hosts, which know nothing of one another but where to meet.
    variables["TORCHELASTIC_RUN_ID"] =
        options_.nodes > 1 ? fmt::format("nodes-{}", port()) : fmt::format("local-{}", ::getpid());
    variables["TORCHELASTIC_RESTART_COUNT"] = std::to_string(options_.restart_count);
    variables["TORCHELASTIC_MAX_RESTARTS"] = std::to_string(options_.max_restarts);
    variables.erase("TORCHELASTIC_USE_AGENT_STORE");
    variables[flight::kPageVariable] = std::to_string(page);
    variables.emplace("OMP_NUM_THREADS", std::to_string(std::max(1, available_cores() / options_.ranks)));
    for (const auto& [name, value] : options_.environment) variables[name] = value;
    std::vector<std::string> entries;
    for (const auto& [name, value] : variables) entries.push_back(name + "=" + value);
    return entries;
  }

  void start(int rank) {
    const flight::View& view = views_.emplace_back();
    const launch::RankOutput::Ends ends = output_.open(rank);
    const std::vector<std::string> environment = environment_of(rank, view.descriptor());
    try {
      const launch::RankProcess& process =
          processes_.emplace_back(launch::RankStart{.command = options_.command,
                                                    .environment = environment,
                                                    .in = ends.in,
                                                    .out = ends.out,
                                                    .err = ends.err,
                                                    .inherited = view.descriptor(),
                                                    .cores = cores_[static_cast<std::size_t>(rank)],
                                                    .own_group = !ends.has_terminal});
      if (!ends.has_terminal) guardian_.add(process.pid());
    } catch (...) {
      output_.close_ends(ends);
      throw;
    }
    output_.close_ends(ends);
  }

  /// All that cannot wait for output: ends, signals, limits.
  void attend() {
    reap();
    for (int number = 0; (number = signals_.take()) != 0;) take_signal(number);
    if (!result_.timed_out && options_.time_limit && Clock::now() - start_ > *options_.time_limit && running() > 0) {
      result_.timed_out = true;
      stop(SIGTERM, options_.grace);
    }
    if (kill_at_ && Clock::now() > *kill_at_) kill_all();
  }

  /// While nobody reads this process's output. It is waited for as long as it takes, but not by one that was told to
  /// end and whose ranks have been killed.
  bool goes_on() {
    attend();
    return !(killed_ && result_.stopped_by_signal != 0);
  }

  int running() const {
    return static_cast<int>(std::ranges::count_if(processes_, [](const auto& process) { return process.running(); }));
  }

  /// What ranks have started and left, while all are told to end.
  bool waits_for_others() const {
    return kill_at_ && std::ranges::any_of(processes_, [](const auto& process) { return process.has_left_others(); });
  }

  /// For output, an end, a signal, or the time of the next look.
  void wait() {
    std::vector<pollfd> descriptors;
    output_.add_to(descriptors);
    descriptors.push_back({signals_.descriptor(), POLLIN, 0});
    bool sees_ends = true;
    for (const launch::RankProcess& process : processes_) {
      if (!process.running()) continue;
      sees_ends = sees_ends && process.descriptor() >= 0;
      descriptors.push_back({process.descriptor(), POLLIN, 0});
    }
    const bool soon = !sees_ends || kill_at_ || close_at_;
    const milliseconds limit = soon                  ? kLookForEnds
                               : options_.time_limit ? std::min(kLook, *options_.time_limit)
                                                     : kLook;
    if (::poll(descriptors.data(), descriptors.size(), static_cast<int>(limit.count())) > 0)
      output_.read(descriptors, 0);
    if (Clock::now() - sampled_ < kLook) return;
    sampled_ = Clock::now();
    for (flight::View& view : views_) view.sample();
  }

  void reap() {
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
      launch::RankProcess& process = processes_[rank];
      int status = 0;
      if (!process.reap(status)) continue;
      RankExit& end = result_.ranks[rank];
      end.rank = static_cast<int>(rank);
      end.pid = process.pid();
      end.seconds = std::chrono::duration<double>(Clock::now() - start_).count();
      end.ended_by_launcher = kill_at_.has_value();
      end.state = views_[rank].state(true);
      if (WIFSIGNALED(status)) {
        end.signal = WTERMSIG(status);
      } else {
        end.exit_code = WEXITSTATUS(status);
      }
      if (!kill_at_) process.signal(SIGKILL);  // What it has left in its group.
      guardian_.remove(process.pid());
      write_history(static_cast<int>(rank));
      if (end.ok() || end.ended_by_launcher || first_failure_) continue;
      first_failure_ = rank;
      ask_silent_ranks(rank);
    }
    if (!first_failure_ && !kill_at_) find_absent_rank();
    if (!first_failure_ || kill_at_ || !options_.stop_on_failure) return;
    stop(SIGTERM, options_.grace);
  }

  /// A rank that ended well without having met the others, while one of them waits until all ranks have come: nothing
  /// else would end that wait before its timeout.
  void find_absent_rank() {
    const auto is_meeting = [&](const flight::View& view) { return view.is_meeting(options_.nodes * options_.ranks); };
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
      if (processes_[rank].running() || views_[rank].has_met()) continue;
      for (std::size_t other = 0; other < processes_.size(); ++other) {
        if (!processes_[other].running() || !is_meeting(views_[other])) continue;
        result_.ranks[rank].before_meeting = true;
        first_failure_ = rank;
        return;
      }
    }
  }

  /// When a rank's collective was not joined in time: what do those do that it waited for?
  void ask_silent_ranks(std::size_t failed) {
    if (views_[failed].failure() != flight::Failure::kTimeout) return;
    std::optional<int> culprit = views_[failed].culprit();
    if (culprit) *culprit -= result_.first_rank;
    std::vector<int> asked;
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
      if (processes_[rank].running() && (!culprit || *culprit == static_cast<int>(rank)))
        asked.push_back(static_cast<int>(rank));
    }
    result_.silent = look_at(asked);
  }

  std::vector<SilentRank> look_at(const std::vector<int>& ranks) {
    std::vector<bool> asked;
    for (const int rank : ranks) {
      const auto index = static_cast<std::size_t>(rank);
      asked.push_back(views_[index].ask_for_stack(processes_[index].pid()));
    }
    const auto deadline = Clock::now() + kStackLimit;
    const auto is_over = [&] {
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        if (asked[i] && !views_[static_cast<std::size_t>(ranks[i])].has_stack()) return false;
      }
      return true;
    };
    while (!is_over() && Clock::now() < deadline) std::this_thread::sleep_for(milliseconds(2));
    std::vector<SilentRank> result;
    for (const int rank : ranks) {
      const auto index = static_cast<std::size_t>(rank);
      const int pid = processes_[index].pid();
      std::string stack = views_[index].stack();
      if (stack.empty()) stack = flight::stopped_text(pid);
      if (stack.empty()) stack = "gives no stack";
      views_[index].sample();
      result.push_back({rank, pid, views_[index].state(false), stack});
    }
    return result;
  }

  void take_signal(int number) {
    if (number == SIGUSR1) {
      asked_for_states_ = true;
      return;
    }
    if (result_.stopped_by_signal != 0) {
      // The second time it is meant; but the end of a terminal may be told by the kernel and by the shell.
      if (number != SIGHUP) kill_all();
      return;
    }
    result_.stopped_by_signal = number;
    // Ranks know SIGTERM, and keep their work.
    stop(number == SIGHUP ? SIGTERM : number, options_.signal_grace);
  }

  void print_states() {
    std::vector<int> alive;
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
      if (processes_[rank].running()) alive.push_back(static_cast<int>(rank));
    }
    std::string text =
        fmt::format("{:.1f} s after the start:\n", std::chrono::duration<double>(Clock::now() - start_).count());
    for (const SilentRank& rank : look_at(alive)) text += launch::describe(rank, result_.first_rank);
    for (const RankExit& end : result_.ranks) {
      if (end.pid > 0)
        text += fmt::format("  rank {} (pid {}) {}\n", result_.first_rank + end.rank, end.pid, end.describe());
    }
    output_.say(text);
  }

  void stop(int number, milliseconds grace) {
    if (!kill_at_) kill_at_ = Clock::now() + grace;
    for (const launch::RankProcess& process : processes_) process.signal(number);
  }

  void kill_all() {
    for (const launch::RankProcess& process : processes_) process.signal(SIGKILL);
    killed_ = true;
    kill_at_ = Clock::now() + std::chrono::hours(24);
  }

  void write_history(int rank) const {
    const std::string history = views_[static_cast<std::size_t>(rank)].history();
    if (options_.log_dir.empty() || history.empty()) return;
    std::ofstream(output_.folder(rank) / "collectives.txt")
        << fmt::format("{:>8}  {:>8}  {:>10}  what\n", "number", "step", "began") << history;
  }

  /// The first to end is not always the first to fail: a rank that has lost another one may be seen before it.
  void name_first_failure() {
    if (!first_failure_) return;
    std::size_t first = *first_failure_;
    const auto culprit = views_[first].culprit();
    const int local = culprit ? *culprit - result_.first_rank : -1;
    if (views_[first].failure() == flight::Failure::kPeerLost && local >= 0 && local < options_.ranks) {
      const RankExit& other = result_.ranks[static_cast<std::size_t>(local)];
      const double at_once = std::chrono::duration<double>(kAtOnce).count();
      const bool by_itself = !other.ended_by_launcher ||
                             (other.signal != SIGTERM && other.seconds - result_.ranks[first].seconds < at_once);
      if (!other.ok() && by_itself) first = static_cast<std::size_t>(local);
    }
    result_.first_failure = result_.ranks[first];
  }

  const LocalLaunchOptions& options_;
  LocalLaunchResult result_;
  launch::SignalNotes signals_;
  launch::Guardian guardian_;
  std::optional<launch::ReservedPort> port_;
  launch::RankOutput output_;
  std::vector<std::vector<int>> cores_;         ///< [rank]
  std::vector<flight::View> views_;             ///< [rank]
  std::vector<launch::RankProcess> processes_;  ///< [rank]
  std::optional<std::size_t> first_failure_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point sampled_ = start_;
  std::optional<Clock::time_point> kill_at_;  ///< All have been told to end; then they are killed.
  std::optional<Clock::time_point> close_at_;
  bool killed_ = false;
  bool asked_for_states_ = false;
};

}  // namespace

LocalLaunchResult local_launch(const LocalLaunchOptions& options) {
  if (options.ranks < 1) throw InvalidArgument(fmt::format("{} ranks cannot be started: at least 1", options.ranks));
  if (options.command.empty()) throw InvalidArgument("there is no program to start");
  if (options.nodes < 1 || options.node_rank < 0 || options.node_rank >= options.nodes)
    throw InvalidArgument(fmt::format("there is no host {} among {}", options.node_rank, options.nodes));
  if (options.nodes > 1 && (options.master_port == 0 || options.master_addr == "127.0.0.1"))
    throw InvalidArgument(fmt::format("{} hosts need the address and the port of host 0 to meet at", options.nodes));
  return Launch(options).run();
}

}  // namespace ddpkit
