// Tier 0: the standard library only. Records the collectives of a process.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "comm/trace/page.h"

namespace ddpkit::flight {

/// The recorder of this process. Writes to the page that the launcher reads, or to private memory without such a
/// launcher. Costs a few stores per collective: it takes no lock and reads the clock rarely.
///
/// Thread-safe. Collectives of two groups that start on two threads at the same time may share a record.
class Recorder {
 public:
  /// Never destroyed: static objects may call collectives until the program ends.
  static Recorder& of_process() noexcept;

  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  /// Returns a number for a new group of this process, from 0.
  std::uint32_t new_group() noexcept { return groups_.fetch_add(1); }
  /// Returns whether it is the group of all ranks of the job.
  bool is_world(std::uint32_t group) const noexcept { return group == world_group_.load(std::memory_order_relaxed); }

  /// Records the start of a collective. Returns the record, for finish().
  std::uint64_t start(Call call, std::uint64_t sequence, std::uint64_t bytes, std::uint32_t group) noexcept {
    Page& page = *page_;
    const std::uint64_t index = page.next.load(std::memory_order_relaxed);
    Record& record = page.records[index % kRecords];
    record.index.store(index, std::memory_order_relaxed);
    record.finished.store(0, std::memory_order_relaxed);
    record.sequence.store(sequence, std::memory_order_relaxed);
    record.bytes.store(bytes, std::memory_order_relaxed);
    std::uint64_t bucket = bucket_.load(std::memory_order_relaxed);
    if (bucket != 0) bucket_.store(0, std::memory_order_relaxed);
    record.what.store(static_cast<std::uint64_t>(call) | (std::uint64_t{group} << 8) | (bucket << 32),
                      std::memory_order_relaxed);
    record.step.store(page.step.load(std::memory_order_relaxed), std::memory_order_relaxed);
    // Reading the coarse clock takes 6 ns, so it is read only for some of the small collectives.
    const bool look = bytes > kLargeBytes || index % kSmallBetweenLooks == 0;
    record.started_ms.store(look ? now_ms() : 0, std::memory_order_relaxed);
    page.next.store(index + 1, std::memory_order_release);
    return index;
  }
  void finish(std::uint64_t index) noexcept {
    Record& record = page_->records[index % kRecords];
    if (record.index.load(std::memory_order_relaxed) == index) record.finished.store(1, std::memory_order_release);
  }
  const Record& record(std::uint64_t index) const noexcept { return page_->records[index % kRecords]; }
  /// Records that this rank has started a long wait for a collective.
  void waits(std::uint64_t index) noexcept;

  /// Sets the bucket of the next collective.
  void set_bucket(std::size_t bucket) noexcept { bucket_.store(bucket + 1, std::memory_order_relaxed); }
  void set_step(std::int64_t step) noexcept { page_->step.store(step, std::memory_order_relaxed); }
  /// Records that this rank waits in the rendezvous of `world` ranks. The next group is the group of all these ranks.
  void start_rendezvous(int world) noexcept {
    world_group_.store(groups_.load());
    page_->outcome.store(Outcome{});
    page_->world.store(world, std::memory_order_relaxed);
    page_->phase.store(Phase::kRendezvous, std::memory_order_release);
  }
  void set_phase(Phase phase) noexcept { page_->phase.store(phase, std::memory_order_relaxed); }
  /// Records that this rank leaves the group of all ranks. Call it before the others can detect it.
  void leave() noexcept { page_->phase.store(Phase::kLeft); }
  /// Records the failure; only the first counts. `culprit`: rank in the whole job, if known.
  void fail(Failure failure, std::optional<int> culprit) noexcept;

  /// Returns the signal that makes this process write its stack, to the page or, without a launcher, to stderr. 0:
  /// none.
  int stack_signal() const noexcept { return page_->stack_signal.load(std::memory_order_relaxed); }
  /// Returns whether a launcher reads the page.
  bool is_read() const noexcept { return fd_ >= 0; }

 private:
  Recorder() noexcept;
  void attach() noexcept;
  void install_handler() noexcept;
  static void write_stack(int signal);
  static std::uint64_t now_ms() noexcept;

  static constexpr std::uint64_t kLargeBytes = 32 << 10;
  static constexpr std::uint64_t kSmallBetweenLooks = 8;

  Page* page_;
  int fd_ = -1;
  std::atomic<std::uint64_t> bucket_{0};  ///< Bucket of the next collective, plus one; 0: none.
  std::atomic<std::uint32_t> groups_{0};
  std::atomic<std::uint32_t> world_group_{0};
};

}  // namespace ddpkit::flight
