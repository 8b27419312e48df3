// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <ddpkit/comm/process_group.h>

namespace ddpkit {

struct Event;

/// Records the number of the current training step. `ddpkit run` prints the step if a rank fails or hangs. Costs one
/// store. Thread-safe.
///
/// The flight recorder needs no other calls. Every rank keeps its last 1,024 collectives and timeline events in memory
/// that the launcher can read, also after the rank's death.
void set_step(std::int64_t step) noexcept;

/// Options of Timeline.
struct TimelineOptions {
  /// Maximum number of events per rank. Later events are dropped and counted. An event takes about 100 bytes.
  std::size_t max_events = 1'000'000;
};

/// Records the activity of all ranks on one clock, in Chrome's trace format. Open the file in ui.perfetto.dev or
/// chrome://tracing. Each rank is a process. Its track "compute" has forward, backward, the waits within them, and the
/// caller's spans. Each bucket has a track with the time from ready to done, and the reduction.
///
///     ddpkit::Timeline timeline(group, "trace.json");
///     ddp.set_timeline(timeline);
///     ... some steps ...
///     timeline.write();
///
/// The clock is rank 0's CLOCK_MONOTONIC. Ranks on one host share the clock. For other hosts, the constructor measures
/// the difference once, to within half a round trip (clock_error_us in the file). Later clock drift is not corrected.
/// Copies record into the same timeline.
class Timeline {
  struct Impl;

 public:
  /// Collective. Throws InvalidArgument on all ranks if rank 0 cannot write to `path`.
  Timeline(ProcessGroup group, std::string path, const TimelineOptions& options = {});

  /// A span on the track "compute", from construction to destruction.
  class [[nodiscard]] Span {
   public:
    ~Span();
    Span(Span&&) noexcept = default;
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    friend class Timeline;
    Span(std::shared_ptr<Impl> impl, std::string_view name);
    std::shared_ptr<Impl> impl_;
    std::string name_;
    std::chrono::steady_clock::time_point begin_;
  };
  /// Starts a span. The span ends when the returned object is destroyed.
  Span span(std::string_view name) const { return {impl_, name}; }

  /// Gathers the events of all ranks so far and writes them to the file. Replaces an earlier file atomically.
  /// Collective; must not be called within backward. Throws on all ranks if rank 0 cannot write the file.
  void write() const;

  std::size_t events() const;   ///< Events recorded on this rank.
  std::size_t dropped() const;  ///< Events dropped on this rank because of max_events.

 private:
  friend class DistributedDataParallelBase;
  friend class StepStats;
  void add(const Event& event) const;

  std::shared_ptr<Impl> impl_;
};

}  // namespace ddpkit
