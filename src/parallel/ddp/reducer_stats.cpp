#include "parallel/ddp/reducer_impl.h"

#include <algorithm>

#include <fmt/format.h>

#include "comm/timeline_recorder.h"

namespace ddpkit {
namespace {

double microseconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

}  // namespace

/// Buckets end in the order in which they were launched. Asking also moves them on.
void Reducer::Impl::note_finished() {
  // The host runs ahead of a device: what it would see says little, and asking is not allowed in a stream's capture.
  if (seen_.has_streams()) return;
  for (; next_finished_ < next_bucket_; ++next_finished_) {
    Bucket& bucket = buckets_[next_finished_];
    if (bucket.finish || !bucket.work.is_completed()) return;
    bucket.timing.finished = Clock::now();
  }
}

/// Adds the last backward to what stats() tells.
void Reducer::Impl::note_step() {
  Clock::time_point covered = trace->first_gradient;
  for (const BucketTiming& bucket : trace->buckets) {
    bytes_ += bucket.bytes;
    sent_bytes_ += bucket.sent_bytes;
    if (seen_.has_streams()) continue;  // Its times are those at which work was queued.
    const Clock::time_point begin = std::max(bucket.started, covered);
    if (bucket.sent_bytes == 0 || bucket.finished <= begin) continue;
    communication_ += bucket.finished - begin;
    hidden_ += std::max(Clock::duration{}, std::min(bucket.finished, trace->last_gradient) - begin);
    covered = bucket.finished;
  }
}

void Reducer::Impl::record_step() {
  TimelineRecorder& to = *timeline_->recorder();
  const bool reached = reached_output_ != Clock::time_point{} && reached_output_ <= trace->first_gradient;
  to.add("backward", TimelineRecorder::kCompute, reached ? reached_output_ : trace->first_gradient, trace->end,
         {.step = backwards - 1});
  reached_output_ = {};
  for (std::size_t b = 0; b < trace->buckets.size(); ++b) {
    const BucketTiming& timing = trace->buckets[b];
    const int track = TimelineRecorder::bucket_track(b);
    to.add(fmt::format("bucket {}", b), track, timing.ready, timing.finished,
           {.step = backwards - 1, .bytes = timing.bytes, .parameters = timing.parameters});
    to.add("reduction", track, timing.started, timing.finished, {.bytes = timing.sent_bytes});
  }
  if (write_timeline_after_ == 0 || --write_timeline_after_ > 0) return;
  timeline_->write();
  timeline_.reset();
}

DistributedDataParallelStats Reducer::Impl::stats() const {
  const std::lock_guard lock(mutex_);
  DistributedDataParallelStats stats{.steps = backwards,
                                     .rebuilds = rebuilds,
                                     .bytes = bytes_,
                                     .sent_bytes = sent_bytes_,
                                     .communication_us = microseconds(communication_),
                                     .hidden_us = microseconds(hidden_)};
  if (!trace) return stats;
  const auto since = [&](Clock::time_point time) { return microseconds(time - trace->first_gradient); };
  for (const BucketTiming& timing : trace->buckets) {
    stats.buckets.push_back({.parameters = timing.parameters,
                             .bytes = timing.bytes,
                             .sent_bytes = timing.sent_bytes,
                             .ready_us = since(timing.ready),
                             .started_us = since(timing.started),
                             .done_us = since(timing.finished)});
  }
  stats.last_gradient_us = since(trace->last_gradient);
  stats.end_us = since(trace->end);
  return stats;
}

void Reducer::Impl::set_timeline(std::optional<Timeline> timeline, std::uint64_t write_after) {
  const std::lock_guard lock(mutex_);
  timeline_ = std::move(timeline);
  write_timeline_after_ = write_after;
}

void Reducer::Impl::note_outputs(const std::vector<at::Tensor>& outputs) {
  tracker_->at_outputs(outputs, /*leaves_too=*/false, [this] {
    if (synchronize && reached_output_ == Clock::time_point{}) reached_output_ = Clock::now();
  });
}

}  // namespace ddpkit
