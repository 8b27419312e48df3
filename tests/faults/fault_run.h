// A run of `ddpkit run` with a fault, and its results.
#pragma once

#include <signal.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "support/folder.h"

namespace ddpkit::testing {

/// `ddpkit ARGUMENTS...` in the background. Its environment contains a mark, by which the test finds orphan processes.
class FaultRun {
 public:
  /// `prefix`: a command that starts it, such as {"ip", "netns", "exec", "a"}.
  explicit FaultRun(const std::vector<std::string>& arguments, const std::vector<std::string>& prefix = {});
  ~FaultRun();
  FaultRun(const FaultRun&) = delete;
  FaultRun& operator=(const FaultRun&) = delete;

  int pid() const { return pid_; }
  void signal(int number) const { ::kill(pid_, number); }
  /// Returns its exit code, or 128 + the signal that killed it. Fails the test after `limit`, which only a hanging run
  /// reaches.
  int wait(std::chrono::seconds limit = std::chrono::seconds(60));
  /// Returns the same, or nothing if the run has not ended after `limit`.
  std::optional<int> ended_within(std::chrono::seconds limit);
  std::string out() const { return read_file(folder_ / "out"); }
  std::string err() const { return read_file(folder_ / "err"); }
  /// Waits until stdout and stderr together hold `text`.
  void wait_for(const std::string& text, std::chrono::seconds limit = std::chrono::seconds(30)) const;
  /// Returns the remaining processes of this run, after a short time in which they may end.
  std::vector<int> orphans() const;
  double seconds() const { return seconds_; }
  /// The time at which wait() saw the end: steady_clock, in seconds.
  double ended_at() const { return ended_at_; }

 private:
  Folder folder_;
  std::string mark_;
  int pid_ = -1;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double seconds_ = 0, ended_at_ = 0;
};

/// The folder to which the worker writes its events and their times.
class FaultFolder : public Folder {
 public:
  /// The time of the mark: steady_clock, in seconds.
  std::optional<double> time_of(const std::string& name) const;
  std::string text_of(const std::string& name) const;
  int pid_of(int rank) const;
  /// Seconds from the fault until `rank` knew the failed rank.
  std::optional<double> named_after(int rank) const;
  /// Seconds from the fault to the end of the whole run.
  double ended_after(const FaultRun& run) const;
  /// Processes that map the shared memory of the run. The ranks list their regions in the files memory-RANK when the
  /// fault happens.
  std::vector<int> memory_holders() const;
};

/// Returns the arguments of a FaultRun: `run LAUNCHER... -- fault_worker --folder FOLDER OPTIONS...`.
std::vector<std::string> worker_command(const FaultFolder& folder, const std::vector<std::string>& launcher,
                                        const std::vector<std::string>& options = {});

/// steady_clock, in seconds.
double now_seconds();

/// Adds one line to the table that script/test prints: the fault, the promised behaviour, and its duration.
void add_row(const std::string& fault, const std::string& promise, double seconds);

}  // namespace ddpkit::testing
