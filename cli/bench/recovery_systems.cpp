#include "recovery_systems.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <thread>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/launch/launcher.h>

#include "python.h"
#include "recovery_rank.h"
#include "step_plan.h"
#include "timing.h"
#include "workers.h"

namespace ddpkit::bench {
namespace {

using Clock = std::chrono::steady_clock;
using Words = std::vector<std::string>;

constexpr const char* kElastic = "ddpkit-elastic";
constexpr const char* kRestart = "ddpkit-restart";
constexpr const char* kTorchft = "torchft";
constexpr const char* kTorchftDefaults = "torchft-defaults";
constexpr std::chrono::minutes kTimeLimit{5};  ///< Only a hanging round reaches it.

double ms_since(Clock::time_point start, double us) {
  return (us - std::chrono::duration<double, std::micro>(start.time_since_epoch()).count()) / 1e3;
}

/// Processes that a launcher has started, and the lines that they print after kRecoveryReport.
class Job {
 public:
  Job(std::string system, LaunchOptions options) : system_(std::move(system)), options_(std::move(options)) {
    options_.time_limit = kTimeLimit;
    options_.stop_on_failure = false;
    options_.on_output = [this](int rank, const std::string& text) { take_output(rank, text); };
    // The kernel kills the ranks when the thread that started them ends.
    thread_ = std::thread([this] {
      std::exception_ptr error;
      LaunchResult result;
      try {
        result = ddpkit::launch(options_);
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard lock(mutex_);
      result_ = std::move(result);
      error_ = error;
      has_ended_ = true;
      changed_.notify_all();
    });
  }
  /// Waits for the processes.
  ~Job() { thread_.join(); }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  /// Waits for the next line that begins with `kind`. Returns its other words.
  Words next(const std::string& kind) {
    std::unique_lock lock(mutex_);
    std::deque<Words>& lines = lines_[kind];
    changed_.wait(lock, [&] { return !lines.empty() || has_ended_; });
    if (lines.empty()) {
      if (error_) std::rethrow_exception(error_);
      std::cerr << others_;
      throw WorkerFailed(fmt::format("{}: the ranks ended before they printed \"{}\"", system_, kind),
                         std::max(1, result_.exit_code()));
    }
    Words words = std::move(lines.front());
    lines.pop_front();
    return words;
  }

 private:
  void take_output(int rank, const std::string& text) {
    const std::lock_guard lock(mutex_);
    std::string& pending = pending_[rank];
    pending += text;
    for (std::size_t end; (end = pending.find('\n')) != std::string::npos; pending.erase(0, end + 1)) {
      const std::string line = pending.substr(0, end);
      // `ddpkit run` prints the lines of other ranks after "[rank N] ".
      const std::size_t begin = line.find(kRecoveryReport);
      if (begin == std::string::npos) {
        others_ += fmt::format("[{}] {}\n", system_, line);
        continue;
      }
      std::istringstream stream(line.substr(begin));
      std::string word, kind;
      stream >> word >> kind;
      Words words;
      while (stream >> word) words.push_back(word);
      lines_[kind].push_back(std::move(words));
      changed_.notify_all();
    }
  }

  std::string system_;
  LaunchOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, std::string> pending_;              ///< Incomplete lines. [rank]
  std::map<std::string, std::deque<Words>> lines_;  ///< [kind]
  std::string others_;                              ///< Other output, shown after a failure.
  LaunchResult result_;
  std::exception_ptr error_;
  bool has_ended_ = false;
  std::thread thread_;
};

struct Round {
  double kill_to_step_ms = 0;
  std::optional<double> rejoin_ms, stall_ms;
};

/// Waits until all ranks train, and kills one at a random moment. Returns the time and the rank.
std::pair<Clock::time_point, int> kill_one(Job& job, int ranks, std::mt19937_64& dice) {
  std::map<int, pid_t> pids;
  while (std::ssize(pids) < ranks) {
    const Words words = job.next("ready");
    pids[std::stoi(words.at(0))] = std::stoi(words.at(1));
  }
  const int victim = 1 + static_cast<int>(dice() % static_cast<std::uint64_t>(ranks - 1));
  std::this_thread::sleep_for(std::chrono::microseconds(50000 + dice() % 100000));
  const Clock::time_point time = Clock::now();
  if (::kill(pids.at(victim), SIGKILL) != 0) throw Error(fmt::format("rank {} has ended before the kill", victim));
  return {time, victim};
}

/// The steps of `ranks` ranks: the last one's time after `start`, and the longest step of all.
std::pair<double, double> last_step(Job& job, int ranks, Clock::time_point start) {
  double last = 0, longest = 0;
  for (int i = 0; i < ranks; ++i) {
    const Words words = job.next("step");
    last = std::max(last, ms_since(start, std::stod(words.at(1))));
    longest = std::max(longest, std::stod(words.at(2)) / 1e3);
  }
  return {last, longest};
}

Round ddpkit_round(const std::string& system, std::int64_t resident_mib, const RecoveryOptions& options,
                   std::mt19937_64& dice) {
  const int ranks = options.ranks;
  const bool is_elastic = system == kElastic;
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  const std::string checkpoint =
      (std::filesystem::temp_directory_path() / fmt::format("ddpkit-recovery-{}.pt", ::getpid())).string();
  std::filesystem::remove(checkpoint);
  std::vector<std::string> command = {program, "run", "--nproc-per-node", std::to_string(ranks)};
  const std::vector<std::string> recovery =
      is_elastic ? std::vector<std::string>{"--min-ranks", "1", "--max-replacements", "1"}
                 : std::vector<std::string>{"--max-restarts", "1"};
  command.insert(command.end(), recovery.begin(), recovery.end());
  command.insert(command.end(), {"--", program, "bench", "recovery", "--as-rank", is_elastic ? "elastic" : "restart",
                                 "--model", options.model, "--optimizer", options.optimizer, "--resident-mib",
                                 std::to_string(resident_mib), "--checkpoint", checkpoint});
  Round round;
  {
    Job job(system, {.command = command, .environment = {{"OMP_NUM_THREADS", "1"}}});
    const auto [time, victim] = kill_one(job, ranks, dice);
    round.kill_to_step_ms = last_step(job, is_elastic ? ranks - 1 : ranks, time).first;
    // The launcher starts the new process at once.
    if (is_elastic) std::tie(round.rejoin_ms, round.stall_ms) = last_step(job, ranks, time);
  }
  std::filesystem::remove(checkpoint);
  return round;
}

Round torchft_round(const std::string& system, std::int64_t resident_mib, const RecoveryOptions& options,
                    std::mt19937_64& dice) {
  const int ranks = options.ranks;
  std::vector<std::string> common = torchft_command("recovery.py");
  if (system == kTorchft) common.push_back("--tuned");
  const auto with = [&](const std::vector<std::string>& more) {
    std::vector<std::string> command = common;
    command.insert(command.end(), more.begin(), more.end());
    return LaunchOptions{.command = command, .environment = {{"OMP_NUM_THREADS", "1"}}};
  };
  Job lighthouse(system, with({"--lighthouse"}));
  const Words place = lighthouse.next("lighthouse");
  const std::vector<std::string> replica = {"--address",      place.at(1),
                                            "--replicas",     std::to_string(ranks),
                                            "--resident-mib", std::to_string(resident_mib),
                                            "--model",        model_argument(options.model),
                                            "--optimizer",    options.optimizer};
  Round round;
  {
    LaunchOptions all = with(replica);
    all.ranks = ranks;
    Job job(system, all);
    const auto [time, victim] = kill_one(job, ranks, dice);
    round.kill_to_step_ms = last_step(job, ranks - 1, time).first;
    const Clock::time_point start = Clock::now();
    std::vector<std::string> one = replica;
    one.insert(one.end(), {"--replacement", std::to_string(victim)});
    Job replacement(system, with(one));
    const auto [rejoin, stall] = last_step(job, ranks - 1, start);
    round.rejoin_ms = rejoin;
    round.stall_ms = stall;
  }
  ::kill(std::stoi(place.at(0)), SIGTERM);
  return round;
}

std::string text_of(const std::optional<double>& value) { return value ? fmt::format("{:.1f}", *value) : "-"; }

}  // namespace

std::vector<std::string> recovery_systems(const RecoveryOptions& options) {
  std::vector<std::string> systems = {kElastic, kRestart};
  if (options.peers) systems.insert(systems.end(), {kTorchft, kTorchftDefaults});
  return systems;
}

RecoveryRow bench_recovery_of(const std::string& system, std::int64_t resident_mib, const RecoveryOptions& options) {
  std::mt19937_64 dice(options.seed);
  const auto measure = system.starts_with(kTorchft) ? torchft_round : ddpkit_round;
  std::vector<double> kill_to_step, rejoin, stall;
  for (int i = 0; i < options.rounds; ++i) {
    const Round round = measure(system, resident_mib, options, dice);
    kill_to_step.push_back(round.kill_to_step_ms);
    if (round.rejoin_ms) rejoin.push_back(*round.rejoin_ms);
    if (round.stall_ms) stall.push_back(*round.stall_ms);
  }
  RecoveryRow row{
      .system = system, .ranks = options.ranks, .resident_mib = resident_mib, .kill_to_step_ms = median(kill_to_step)};
  if (!rejoin.empty()) row.rejoin_ms = median(rejoin);
  if (!stall.empty()) row.stall_ms = median(stall);
  return row;
}

std::string recovery_table_header() {
  return fmt::format("# {:<16} {:>5} {:>12} {:>15} {:>9} {:>8}", "system", "ranks", "resident_mib", "kill_to_step_ms",
                     "rejoin_ms", "stall_ms");
}

std::string table_row(const RecoveryRow& row) {
  return fmt::format("{:<18} {:>5} {:>12} {:>15.1f} {:>9} {:>8}", row.system, row.ranks, row.resident_mib,
                     row.kill_to_step_ms, text_of(row.rejoin_ms), text_of(row.stall_ms));
}

std::string to_csv(const RecoveryRow& row) {
  return fmt::format("{},{},{},{:.3f},{},{}", row.system, row.ranks, row.resident_mib, row.kill_to_step_ms,
                     text_of(row.rejoin_ms), text_of(row.stall_ms));
}

}  // namespace ddpkit::bench
