#include "parallel/ddp/step_stats.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "comm/timeline_recorder.h"

namespace ddpkit {
namespace {

double microseconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

}  // namespace

void StepStats::add(BackwardTrace trace) {
  Clock::time_point covered = trace.first_gradient;
  for (const BucketTiming& bucket : trace.buckets) {
    bytes_ += bucket.bytes;
    sent_bytes_ += bucket.sent_bytes;
    if (on_device_) continue;
    const Clock::time_point begin = std::max(bucket.started, covered);
    if (bucket.sent_bytes == 0 || bucket.finished <= begin) continue;
    communication_ += bucket.finished - begin;
    hidden_ += std::max(Clock::duration{}, std::min(bucket.finished, trace.last_gradient) - begin);
    covered = bucket.finished;
  }
  last_ = std::move(trace);
  ++backwards_;
  if (timeline_) record_step();
}

void StepStats::record_step() {
  TimelineRecorder& to = *timeline_->recorder();
  const std::uint64_t step = backwards_ - 1;
  const bool reached = reached_output_ != Clock::time_point{} && reached_output_ <= last_->first_gradient;
  to.add("backward", TimelineRecorder::kCompute, reached ? reached_output_ : last_->first_gradient, last_->end,
         {.step = step});
  reached_output_ = {};
  for (std::size_t b = 0; b < last_->buckets.size(); ++b) {
    const BucketTiming& timing = last_->buckets[b];
    const int track = TimelineRecorder::bucket_track(b);
    to.add(fmt::format("bucket {}", b), track, timing.ready, timing.finished,
           {.step = step, .bytes = timing.bytes, .parameters = timing.parameters});
    to.add("reduction", track, timing.started, timing.finished, {.bytes = timing.sent_bytes});
  }
  if (write_timeline_after_ == 0 || --write_timeline_after_ > 0) return;
  timeline_->write();
  timeline_.reset();
}

DistributedDataParallelStats StepStats::stats(int rebuilds) const {
  DistributedDataParallelStats stats{.steps = backwards_,
                                     .rebuilds = rebuilds,
                                     .bytes = bytes_,
                                     .sent_bytes = sent_bytes_,
                                     .communication_us = microseconds(communication_),
                                     .hidden_us = microseconds(hidden_)};
  if (!last_) return stats;
  const auto since = [&](Clock::time_point time) { return microseconds(time - last_->first_gradient); };
  for (const BucketTiming& timing : last_->buckets) {
    stats.buckets.push_back({.parameters = timing.parameters,
                             .bytes = timing.bytes,
                             .sent_bytes = timing.sent_bytes,
                             .ready_us = since(timing.ready),
                             .started_us = since(timing.started),
                             .done_us = since(timing.finished)});
  }
  stats.last_gradient_us = since(last_->last_gradient);
  stats.end_us = since(last_->end);
  return stats;
}

void StepStats::set_timeline(std::optional<Timeline> timeline, std::uint64_t write_after) {
  timeline_ = std::move(timeline);
  write_timeline_after_ = write_after;
}

void StepStats::note_output_reached() {
  if (reached_output_ == Clock::time_point{}) reached_output_ = Clock::now();
}

void StepStats::record_wait(std::size_t bucket, Clock::time_point begin, Clock::time_point end) const {
  if (timeline_)
    timeline_->recorder()->add(fmt::format("wait for bucket {}", bucket), TimelineRecorder::kCompute, begin, end);
}

}  // namespace ddpkit
