// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include <ddpkit/comm/process_group.h>

namespace ddpkit {

class TimelineRecorder;

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
    Span(std::shared_ptr<TimelineRecorder> recorder, std::string_view name);
    std::shared_ptr<TimelineRecorder> recorder_;
    std::string name_;
    std::chrono::steady_clock::time_point begin_;
  };
  /// Starts a span. The span ends when the returned object is destroyed.
  Span span(std::string_view name) const { return {recorder_, name}; }

  /// Gathers the events of all ranks so far and writes them to the file. Replaces an earlier file atomically.
  /// Collective; must not be called within backward. Throws on all ranks if rank 0 cannot write the file.
  void write() const;

  std::size_t events() const;   ///< Events recorded on this rank.
  std::size_t dropped() const;  ///< Events dropped on this rank because of max_events.

  /// Returns the recorder that all copies share.
  const std::shared_ptr<TimelineRecorder>& recorder() const noexcept { return recorder_; }

 private:
  std::shared_ptr<TimelineRecorder> recorder_;
};

}  // namespace ddpkit
