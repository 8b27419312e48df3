// Tier 0: the standard library only. How a launcher reads what a rank has recorded.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "comm/trace/page.h"

namespace ddpkit::flight {

/// A page for one rank: unnamed memory, the owner's alone, gone with the processes that have it.
class View {
 public:
  View();
  ~View();
  View(View&& other) noexcept;
  View& operator=(View&&) = delete;

  /// For the rank to inherit, under the name kPageVariable.
  int descriptor() const noexcept { return fd_; }

  /// What its collectives failed with, and who is at fault.
  Failure failure() const noexcept;
  std::optional<int> culprit() const noexcept;

  /// Whether the rank waits for the others of a world of `world` ranks.
  bool is_meeting(int world) const noexcept;
  /// Whether it has met the others, or those of a world of its own.
  bool has_met() const noexcept;
  /// Whether the rank has left the group of all ranks.
  bool has_left() const noexcept;

  /// Looks whether the rank has gone on since the last call.
  void sample() noexcept;

  /// "is in all_reduce number 812 (4096 bytes, group 0, bucket 2) at step 40 for 3.1 s", or what the rank did last: a
  /// sentence without its subject. `ended`: the rank has ended; empty when it never came to init_process_group.
  std::string state(bool ended) const;
  /// The same of each collective that the page holds, oldest first, one a line.
  std::string history() const;

  /// Asks process `pid` for its stack. False when it has no page, or no way to tell.
  bool ask_for_stack(int pid) noexcept;
  /// Whether a stack has come since ask_for_stack().
  bool has_stack() const noexcept;
  /// That stack: functions with their names, innermost first, one a line.
  std::string stack() const;

 private:
  using Clock = std::chrono::steady_clock;

  int fd_ = -1;
  Page* page_ = nullptr;
  std::uint32_t stacks_before_ = 0;
  std::uint64_t seen_ = 0;  ///< Collectives that were started and finished at the last sample.
  Clock::time_point seen_at_ = Clock::now();
};

/// "is stopped (SIGSTOP)" for a process that is; otherwise empty.
std::string stopped_text(int pid);

}  // namespace ddpkit::flight
