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
  /// Of each rank; later ones are dropped and counted. An event takes about 100 bytes.
  std::size_t max_events = 1'000'000;
};

/// What all ranks did and when, on one clock, in Chrome's trace format: open the file in ui.perfetto.dev or
/// chrome://tracing. Each rank is a process with a track "compute" (forward, backward, waits within them, spans of the
/// caller's own) and one a bucket (from ready to done, and the reduction within).
///
///     ddpkit::Timeline timeline(group, "trace.json");
///     ddp.set_timeline(timeline);
///     ... some steps ...
///     timeline.write();
///
/// The clock is rank 0's CLOCK_MONOTONIC. Ranks on one host share it. For ranks on other hosts the difference is
/// measured once, when the timeline is made, to within half a round trip (the file says how near, as clock_error_us);
/// clocks that drift apart later are not corrected. A handle: copies record into the same timeline.
class Timeline {
 public:
  /// Collective. Throws InvalidArgument on all ranks when rank 0 cannot write to `path`.
  Timeline(ProcessGroup group, std::string path, const TimelineOptions& options = {});

  /// From its construction to its end, on the track "compute".
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
  /// Begins a span of the caller's own, which ends with the object.
  Span span(std::string_view name) const { return {recorder_, name}; }

  /// Collective, and not within backward: rank 0 gathers the events of all ranks so far and writes them to a file,
  /// which takes the place of an earlier one when it is whole. Throws on all ranks when it cannot be written.
  void write() const;

  /// Events of this rank, and those that max_events has shut out.
  std::size_t events() const;
  std::size_t dropped() const;

  const std::shared_ptr<TimelineRecorder>& recorder() const noexcept { return recorder_; }

 private:
  std::shared_ptr<TimelineRecorder> recorder_;
};

}  // namespace ddpkit
