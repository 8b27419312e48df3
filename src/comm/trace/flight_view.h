// Tier 0: the standard library only. Reads the events of a rank, for a launcher.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/trace/event_ring.h"

namespace ddpkit {

/// A page for one rank: anonymous memory that only its owner can access, freed when the processes that have it end.
class FlightView {
 public:
  FlightView();
  ~FlightView();
  FlightView(FlightView&& other) noexcept;
  FlightView& operator=(FlightView&& other) noexcept;

  /// Returns the descriptor that the rank inherits; kEventPageVariable holds its number.
  int descriptor() const noexcept { return fd_; }

  /// Returns the failure of its collectives, and the rank that caused it.
  FailureKind failure() const noexcept;
  std::optional<int> failed_rank() const noexcept;

  /// Returns whether the rank waits in the rendezvous of `world` ranks.
  bool is_in_rendezvous(int world) const noexcept;
  /// Returns whether the rank is new and waits to join the others.
  bool is_joining() const noexcept;
  /// Reports to the rank how many new ranks wait to join.
  void set_joining(int ranks) noexcept;
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
  /// Returns all events in the page, oldest first, one per line.
  std::string history() const;

  /// Requests the stack of process `pid`. Returns false if the process has no page or no handler.
  bool ask_for_stack(int pid) noexcept;
  /// Returns whether a stack was written since ask_for_stack().
  bool has_stack() const noexcept;
  /// Returns that stack: function names, innermost first, one per line.
  std::string stack() const;

 private:
  std::vector<Event> events() const;  ///< Oldest first.

  int fd_ = -1;
  EventPage* page_ = nullptr;
  std::uint32_t stacks_before_ = 0;
  std::uint64_t seen_ = 0;  ///< Number of events started and finished at the last sample.
  std::int64_t seen_at_ns_ = now_ns();
};

/// Returns "is stopped (SIGSTOP)" for a stopped process; otherwise empty.
std::string stopped_text(int pid);

}  // namespace ddpkit
