// A run of `ddpkit run` that something happens to, and what it leaves behind.
#pragma once

#include <signal.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "support/folder.h"

namespace ddpkit::testing {

/// `ddpkit ARGUMENTS...` in the background. All that it starts carries a mark in its environment, by which orphans are
/// found.
class FaultRun {
 public:
  /// `prefix`: what to start it with, such as {"ip", "netns", "exec", "a"}.
  explicit FaultRun(const std::vector<std::string>& arguments, const std::vector<std::string>& prefix = {});
  ~FaultRun();
  FaultRun(const FaultRun&) = delete;
  FaultRun& operator=(const FaultRun&) = delete;

  int pid() const { return pid_; }
  void signal(int number) const { ::kill(pid_, number); }
  /// Its exit code, 128 + the signal that killed it. Fails the test when it has not ended after `limit`, which only a
  /// hang reaches.
  int wait(std::chrono::seconds limit = std::chrono::seconds(60));
  /// The same, and nothing when it has not ended after `limit`.
  std::optional<int> ended_within(std::chrono::seconds limit);
  std::string out() const { return read_file(folder_ / "out"); }
  std::string err() const { return read_file(folder_ / "err"); }
  /// Waits until stdout and stderr together hold `text`.
  void wait_for(const std::string& text, std::chrono::seconds limit = std::chrono::seconds(30)) const;
  /// Processes of this run that are left, after a moment in which they may end.
  std::vector<int> orphans() const;
  double seconds() const { return seconds_; }
  /// When wait() saw the end, of steady_clock, in seconds.
  double ended_at() const { return ended_at_; }

 private:
  Folder folder_;
  std::string mark_;
  int pid_ = -1;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double seconds_ = 0, ended_at_ = 0;
};

/// The folder in which the worker leaves what happened, and when.
class FaultFolder : public Folder {
 public:
  /// When it was marked, of steady_clock, in seconds.
  std::optional<double> time_of(const std::string& name) const;
  std::string text_of(const std::string& name) const;
  int pid_of(int rank) const;
  /// Seconds from the fault to the moment at which rank `rank` knew.
  std::optional<double> named_after(int rank) const;
  /// Seconds from the fault to the end of the whole run.
  double ended_after(const FaultRun& run) const;
  /// Processes that map the shared memory of the run. The ranks list their regions in the files memory-RANK when the
  /// fault happens.
  std::vector<int> memory_holders() const;
};

/// What a FaultRun starts: `run LAUNCHER... -- fault_worker --folder FOLDER OPTIONS...`.
std::vector<std::string> worker_command(const FaultFolder& folder, const std::vector<std::string>& launcher,
                                        const std::vector<std::string>& options = {});

/// Of steady_clock.
double now_seconds();

/// One line of the table that script/test prints: what happened, what was promised, and how long it took.
void add_row(const std::string& fault, const std::string& promise, double seconds);

}  // namespace ddpkit::testing
