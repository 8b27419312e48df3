// Tier 0: the standard library only. The processes of this host's ranks, and what they write about themselves.
#pragma once

#include <cstddef>
#include <vector>

#include <ddpkit/launch/launch_options.h>

#include "comm/trace/flight_view.h"
#include "launch/process_reaper.h"
#include "launch/rank_output.h"
#include "launch/rank_process.h"

namespace ddpkit::launcher {

class LocalRanks {
 public:
  /// Both must outlive this object.
  LocalRanks(const LaunchOptions& options, RankOutput& output);

  /// Starts the process of a rank: of the next one, or one that replaces a lost process. `port`, `pass`: see
  /// rank_environment(). Throws like RankProcess.
  void start(std::size_t rank, int port, int pass);

  /// Returns the number of running processes.
  int running() const;
  /// The same without replacements that have not joined the others.
  int running_inside() const;
  /// Reports to the ranks how many replacements wait to join. Returns whether a rank can let them join.
  bool announce_replacements();

  /// Readable after a process has ended.
  int end_descriptor() const noexcept { return ends_.descriptor(); }
  /// Returns whether end_descriptor() becomes readable at each end.
  bool sees_ends() const;
  /// Returns the ranks that may have ended, in the order of their ends.
  std::vector<std::size_t> ended() const;
  /// Returns true once, after the end; see RankProcess::has_ended().
  bool has_ended(std::size_t rank, int& exit_code, int& signal);
  /// See RankProcess::release().
  void release(std::size_t rank);

  std::vector<FlightView> views;       ///< [rank]
  std::vector<RankProcess> processes;  ///< [rank]

 private:
  bool is_outside(std::size_t rank) const { return replaced_[rank] && !views[rank].has_connected(); }

  const LaunchOptions& options_;
  RankOutput& output_;
  const std::vector<std::vector<int>> cores_;  ///< [rank]
  std::vector<bool> replaced_;                 ///< The process is a replacement. [rank]
  ProcessReaper reaper_;
  EndOrder ends_;
};

}  // namespace ddpkit::launcher
