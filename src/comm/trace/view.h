// Tier 0: the standard library only. Reads the records of a rank, for a launcher.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "comm/trace/page.h"

namespace ddpkit::flight {

/// A page for one rank: anonymous memory that only its owner can access, freed when the processes that have it end.
class View {
 public:
  View();
  ~View();
  View(View&& other) noexcept;
  View& operator=(View&&) = delete;

  /// Returns the descriptor that the rank inherits; kPageVariable holds its number.
  int descriptor() const noexcept { return fd_; }

  /// Returns the failure of its collectives, and the rank that caused it.
  Failure failure() const noexcept;
  std::optional<int> culprit() const noexcept;

  /// Returns whether the rank waits in the rendezvous of `world` ranks.
  bool is_in_rendezvous(int world) const noexcept;
  /// Returns whether the rank has completed its rendezvous, also that of a group of one.
  bool has_connected() const noexcept;
  /// Returns whether the rank has left the group of all ranks.
  bool has_left() const noexcept;

  /// Checks whether the rank has made progress since the last call.
  void sample() noexcept;

  /// Returns "is in all_reduce number 812 (4096 bytes, group 0, bucket 2) at step 40 for 3.1 s", or the rank's last
  /// activity: a sentence without its subject. `ended`: the rank has ended; then the text is empty if the rank never
  /// called init_process_group.
  std::string state(bool ended) const;
  /// Returns all collectives in the page, oldest first, one per line.
  std::string history() const;

  /// Requests the stack of process `pid`. Returns false if the process has no page or no handler.
  bool ask_for_stack(int pid) noexcept;
  /// Returns whether a stack was written since ask_for_stack().
  bool has_stack() const noexcept;
  /// Returns that stack: function names, innermost first, one per line.
  std::string stack() const;

 private:
  using Clock = std::chrono::steady_clock;

  int fd_ = -1;
  Page* page_ = nullptr;
  std::uint32_t stacks_before_ = 0;
  std::uint64_t seen_ = 0;  ///< Number of collectives started and finished at the last sample.
  Clock::time_point seen_at_ = Clock::now();
};

/// Returns "is stopped (SIGSTOP)" for a stopped process; otherwise empty.
std::string stopped_text(int pid);

}  // namespace ddpkit::flight
