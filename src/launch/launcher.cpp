#include "launch/launch_round.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <set>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/trace/flight_view.h"
#include "launch/host_rounds.h"
#include "launch/hosted_store.h"
#include "launch/local_ranks.h"
#include "launch/rank_output.h"
#include "launch/report.h"
#include "launch/reserved_port.h"
#include "launch/signal_pipe.h"
#include "launch/stacks.h"

namespace ddpkit {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Interval for reading the flight recorders of the ranks.
constexpr milliseconds kLook(250);
/// Interval for polling the ranks, on a kernel without pidfds.
constexpr milliseconds kLookForEnds(10);

class Launch {
 public:
  Launch(const LaunchOptions& options, launcher::HostRounds* hosts)
      : options_(options),
        hosts_(hosts),
        signals_(options.forward_signals),
        output_(options, [this] { return keeps_waiting(); }) {
    result_.ranks.resize(static_cast<std::size_t>(options.ranks));
    sent_signals_.resize(result_.ranks.size());
    result_.first_rank = options.node_rank * options.ranks;
  }

  LaunchResult run() {
    if (options_.master_port == 0) port_.emplace();
    store_.emplace(options_, port());
    for (std::size_t rank = 0; rank < result_.ranks.size(); ++rank) start(rank);
    while (ranks_.running() > 0 || waits_for_others() || !output_.empty()) {
      wait();
      attend();
      if (std::exchange(asked_for_states_, false)) print_states();
      // Does not wait for processes that left their rank's group, though they may keep its output open.
      if (ranks_.running() == 0 && !waits_for_others()) {
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

  void start(std::size_t rank) { ranks_.start(rank, port(), store_->descriptor()); }

  /// Handles everything that cannot wait for output: ends, signals, time limits.
  void attend() {
    reap();
    for (int number = 0; (number = signals_.take()) != 0;) take_signal(number);
    if (hosts_ && hosts_->has_ended() && !std::exchange(result_.ended_by_hosts, true)) follow_hosts();
    if (!result_.timed_out && options_.time_limit && Clock::now() - start_ > *options_.time_limit &&
        ranks_.running() > 0) {
      result_.timed_out = true;
      stop(SIGTERM, options_.grace);
    }
    if (kill_at_ && Clock::now() > *kill_at_) end_spared_or_kill_all();
  }

  /// Called while the reader of this process's output blocks. Waits for the reader without limit, except after a signal
  /// to stop when all ranks have been killed.
  bool keeps_waiting() {
    attend();
    return !(killed_ && result_.stopped_by_signal != 0);
  }

  /// Starts a process instead of a lost rank, if the options allow one more.
  void replace(std::size_t rank) {
    if (replacements_ == options_.max_replacements || kill_at_) return;
    ++replacements_;
    std::erase(ended_, rank);
    result_.ranks[rank] = {};
    start(rank);
    output_.log(fmt::format("rank {} (pid {}) replaces the lost one ({} of {})\n",
                            result_.first_rank + static_cast<int>(rank), processes_[rank].pid(), replacements_,
                            options_.max_replacements));
  }

  /// Reports to the ranks how many new ones wait. Ends those that still wait when the others have ended.
  void look_after_replacements() {
    if (replacements_ == 0 || ranks_.running() == 0 || ranks_.announce_replacements()) return;
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) send_signal(rank, SIGKILL);
  }

  /// Returns the number of ranks that run or have ended well. A rank may end after the others that continued without
  /// it.
  int intact() const {
    int ranks = ranks_.running_inside();
    for (const std::size_t rank : ended_) ranks += result_.ranks[rank].ok() ? 1 : 0;
    return ranks;
  }

  /// Returns whether child processes of ended ranks still run during the grace time of a stop.
  bool waits_for_others() {
    if (!kill_at_ || std::ranges::none_of(processes_, &launcher::RankProcess::holds_group)) return false;
    const std::set<pid_t> groups = launcher::living_groups();
    bool waits = false;
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
      if (!processes_[rank].holds_group()) continue;
      const bool has_left_others = groups.contains(processes_[rank].pid());
      if (!has_left_others) ranks_.release(rank);
      waits = waits || has_left_others;
    }
    return waits;
  }

  /// Waits for output, an end, a signal, or the next poll.
  void wait() {
    std::vector<pollfd> descriptors;
    output_.add_to(descriptors);
    descriptors.push_back({signals_.descriptor(), POLLIN, 0});
    descriptors.push_back({ranks_.end_descriptor(), POLLIN, 0});
    if (hosts_ && !result_.ended_by_hosts) descriptors.push_back({hosts_->descriptor(), POLLIN, 0});
    const bool soon = !ranks_.sees_ends() || kill_at_ || close_at_;
    const milliseconds limit = soon                  ? kLookForEnds
                               : options_.time_limit ? std::min(kLook, *options_.time_limit)
                                                     : kLook;
    if (::poll(descriptors.data(), descriptors.size(), static_cast<int>(limit.count())) > 0)
      output_.read(descriptors, 0);
    if (Clock::now() - sampled_ < kLook) return;
    sampled_ = Clock::now();
    for (FlightView& view : views_) view.sample();
    look_after_replacements();
  }

  void reap() {
    for (const std::size_t rank : ranks_.ended()) note_end(rank);
    if (!first_failure_ && !kill_at_) find_absent_rank();
    if (!first_failure_ || kill_at_ || !options_.stop_on_failure) return;
    spared_ = suspects();
    stop(SIGTERM, options_.grace);
    if (!hosts_) return;
    // After a timeout, the blamed rank is silent but has not failed.
    const FlightView& view = views_[spared_.empty() ? *first_failure_ : spared_.front()];
    hosts_->fail(view.failure() == FailureKind::kPeerLost ? view.failed_rank().value_or(launcher::kAnyRank)
                                                          : launcher::kNoRank);
  }

  /// Ends the ranks, because another host or a rank of another host has failed. A rank that another host has lost may
  /// end without a signal.
  void follow_hosts() {
    if (kill_at_) return;
    for (std::size_t rank = 0; rank < views_.size(); ++rank) {
      const bool has_left = views_[rank].has_left() && !launcher::lost_another(views_[rank].failure());
      const int blamed = hosts_->blamed_rank();
      if (blamed == result_.first_rank + static_cast<int>(rank) || (blamed == launcher::kAnyRank && has_left))
        spared_.push_back(rank);
    }
    stop(SIGTERM, options_.grace);
  }

  void note_end(std::size_t rank) {
    RankExit& end = result_.ranks[rank];
    if (!ranks_.has_ended(rank, end.exit_code, end.signal)) return;
    ended_.push_back(rank);
    end.rank = static_cast<int>(rank);
    end.pid = processes_[rank].pid();
    end.seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    end.ended_by_launcher = sent_signals_[rank] != 0;
    end.state = views_[rank].state(true);
    if (!end.ended_by_launcher) {
      processes_[rank].signal(SIGKILL);  // Kills the remaining processes of its group.
      ranks_.release(rank);
    }
    write_history(static_cast<int>(rank));
    if (end.ok() || end.ended_by_launcher || first_failure_) return;
    if (const int others = intact(); options_.min_ranks > 0 && others >= options_.min_ranks) {
      output_.log(fmt::format("rank {} (pid {}) {}; {} rank{}\n", result_.first_rank + end.rank, end.pid,
                              end.describe(), others, others == 1 ? " continues" : "s continue"));
      return replace(rank);
    }
    first_failure_ = rank;
    inspect_hung_ranks(rank);
  }

  /// Finds a rank that exited with code 0 without joining the group while another rank waits for all ranks to join.
  /// Without this check, the wait would end only at its timeout.
  void find_absent_rank() {
    const auto is_in_rendezvous = [&](const FlightView& view) {
      return view.is_in_rendezvous(options_.nodes * options_.ranks);
    };
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
      if (processes_[rank].running() || views_[rank].has_connected()) continue;
      for (std::size_t other = 0; other < processes_.size(); ++other) {
        if (!processes_[other].running() || !is_in_rendezvous(views_[other])) continue;
        result_.ranks[rank].before_rendezvous = true;
        first_failure_ = rank;
        return;
      }
    }
  }

  /// After a timeout of a rank's collective, records the state of the ranks that it waited for.
  void inspect_hung_ranks(std::size_t failed) {
    if (views_[failed].failure() != FailureKind::kTimeout) return;
    std::optional<int> failed_rank = views_[failed].failed_rank();
    if (failed_rank) *failed_rank -= result_.first_rank;
    std::vector<int> asked;
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
      if (processes_[rank].running() && (!failed_rank || *failed_rank == static_cast<int>(rank)))
        asked.push_back(static_cast<int>(rank));
    }
    result_.hung = launcher::look_at(asked, views_, processes_);
  }

  void take_signal(int number) {
    if (number == SIGUSR1) {
      asked_for_states_ = true;
      return;
    }
    if (result_.stopped_by_signal != 0) {
      // A second signal kills all ranks. Except SIGHUP, which may arrive twice: from the kernel and from the shell.
      if (number != SIGHUP) kill_all();
      return;
    }
    result_.stopped_by_signal = number;
    spared_.clear();
    // Training programs handle SIGTERM and save a checkpoint.
    stop(number == SIGHUP ? SIGTERM : number, options_.signal_grace);
  }

  void print_states() {
    std::vector<int> alive;
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
      if (processes_[rank].running()) alive.push_back(static_cast<int>(rank));
    }
    std::string text =
        fmt::format("{:.1f} s after the start:\n", std::chrono::duration<double>(Clock::now() - start_).count());
    for (const HungRank& rank : launcher::look_at(alive, views_, processes_))
      text += launcher::describe(rank, result_.first_rank);
    for (const RankExit& end : result_.ranks) {
      if (end.pid > 0)
        text += fmt::format("  rank {} (pid {}) {}\n", result_.first_rank + end.rank, end.pid, end.describe());
    }
    output_.log(text);
  }

  void stop(int number, milliseconds grace) {
    if (!kill_at_) kill_at_ = Clock::now() + grace;
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
      if (std::ranges::find(spared_, rank) == spared_.end()) send_signal(rank, number);
    }
  }

  void send_signal(std::size_t rank, int number) {
    if (processes_[rank].running()) sent_signals_[rank] = number;
    processes_[rank].signal(number);
  }

  void end_spared_or_kill_all() {
    const std::vector<std::size_t> spared = std::exchange(spared_, {});
    if (std::ranges::none_of(spared, [&](std::size_t rank) { return processes_[rank].running(); })) return kill_all();
    kill_at_ = Clock::now() + options_.grace;
    for (std::size_t rank = 0; rank < processes_.size(); ++rank)
      send_signal(rank, std::ranges::find(spared, rank) == spared.end() ? SIGKILL : SIGTERM);
  }

  void kill_all() {
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) send_signal(rank, SIGKILL);
    killed_ = true;
    kill_at_ = Clock::now() + std::chrono::hours(24);
  }

  void write_history(int rank) const {
    const std::string history = views_[static_cast<std::size_t>(rank)].history();
    if (options_.log_dir.empty() || history.empty()) return;
    std::ofstream(output_.folder(rank) / "collectives.txt")
        << fmt::format("{:>8}  {:>8}  {:>10}  what\n", "number", "step", "began") << history;
  }

  /// Returns whether the rank ended without a signal from the launcher.
  bool ended_independently(std::size_t rank) const {
    const RankExit& end = result_.ranks[rank];
    return !processes_[rank].running() && (sent_signals_[rank] == 0 || (end.signal != 0 && end.signal != SIGTERM &&
                                                                        end.signal != sent_signals_[rank]));
  }

  std::vector<std::size_t> suspects() const {
    std::vector<launcher::Evidence> ranks;
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
      launcher::Evidence& evidence = ranks.emplace_back();
      evidence.failure = views_[rank].failure();
      const std::optional<int> failed_rank = views_[rank].failed_rank();
      if (failed_rank && *failed_rank >= result_.first_rank && *failed_rank < result_.first_rank + options_.ranks)
        evidence.failed_rank = static_cast<std::size_t>(*failed_rank - result_.first_rank);
      evidence.running = processes_[rank].running();
      evidence.has_left = views_[rank].has_left();
      evidence.ended_independently = ended_independently(rank);
      evidence.ended_well = result_.ranks[rank].ok();
    }
    return launcher::suspects(*first_failure_, ranks, ended_);
  }

  /// The first rank to end is not always the first to fail: a rank that lost a peer may end before the peer.
  void name_first_failure() {
    for (const std::size_t rank : ended_) {
      if (result_.ended_by_hosts && !first_failure_ && !result_.ranks[rank].ok() && ended_independently(rank))
        first_failure_ = rank;
    }
    if (!first_failure_) return;
    const std::vector<std::size_t> ranks = suspects();
    const std::size_t first = ranks.empty() ? *first_failure_ : ranks.front();
    RankExit& end = result_.ranks[first];
    if (!end.before_rendezvous) end.awaited = end.ok() || !ended_independently(first);
    end.lost_peer = launcher::lost_another(views_[first].failure());
    result_.first_failure = end;
  }

  const LaunchOptions& options_;
  launcher::HostRounds* hosts_;
  LaunchResult result_;
  launcher::SignalPipe signals_;
  std::optional<launcher::ReservedPort> port_;
  std::optional<launcher::HostedStore> store_;
  launcher::RankOutput output_;
  launcher::LocalRanks ranks_{options_, output_};
  std::vector<FlightView>& views_ = ranks_.views;                     ///< [rank]
  std::vector<launcher::RankProcess>& processes_ = ranks_.processes;  ///< [rank]
  std::vector<std::size_t> ended_;                                    ///< Ranks, in the order of their ends.
  int replacements_ = 0;
  std::vector<int> sent_signals_;    ///< The last signal sent to the rank; 0: none. [rank]
  std::vector<std::size_t> spared_;  ///< Suspected ranks, which may end without a signal.
  std::optional<std::size_t> first_failure_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point sampled_ = start_;
  std::optional<Clock::time_point> kill_at_;  ///< When to kill the ranks that ignore the signal to stop.
  std::optional<Clock::time_point> close_at_;
  bool killed_ = false;
  bool asked_for_states_ = false;
};

}  // namespace

LaunchResult launcher::launch_round(const LaunchOptions& options, HostRounds* hosts) {
  return Launch(options, hosts).run();
}

}  // namespace ddpkit
