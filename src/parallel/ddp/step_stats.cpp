#include "parallel/ddp/step_stats.h"

#include <algorithm>
#include <utility>

#include "comm/trace/event_ring.h"

namespace ddpkit {
namespace {

double microseconds(Backward::Clock::duration time) { return std::chrono::duration<double, std::micro>(time).count(); }

}  // namespace

void StepStats::add(const Backward& backward) {
  const auto since_first = [&](Clock::time_point time) { return microseconds(time - backward.first_gradient); };
  Clock::time_point covered = backward.first_gradient;
  stats_.buckets.clear();
  for (const BucketState& bucket : backward.buckets) {
    stats_.buckets.push_back({.parameters = bucket.parameters,
                              .bytes = bucket.bytes,
                              .sent_bytes = bucket.sent_bytes,
                              .ready_us = since_first(bucket.ready),
                              .started_us = since_first(bucket.started),
                              .done_us = since_first(bucket.finished)});
    stats_.bytes += bucket.bytes;
    stats_.sent_bytes += bucket.sent_bytes;
    if (on_device_) continue;
    const Clock::time_point begin = std::max(bucket.started, covered);
    if (bucket.sent_bytes == 0 || bucket.finished <= begin) continue;
    stats_.communication_us += microseconds(bucket.finished - begin);
    stats_.hidden_us +=
        microseconds(std::max(Clock::duration{}, std::min(bucket.finished, backward.last_gradient) - begin));
    covered = bucket.finished;
  }
  stats_.last_gradient_us = since_first(backward.last_gradient);
  stats_.end_us = since_first(backward.end);
  ++stats_.steps;
  if (timeline_) record(backward);
}

void StepStats::record(const Backward& backward) {
  const bool reached =
      backward.reached_output != Clock::time_point{} && backward.reached_output <= backward.first_gradient;
  Event whole =
      activity(EventKind::kBackward, reached ? backward.reached_output : backward.first_gradient, backward.end);
  whole.step = static_cast<std::int64_t>(stats_.steps - 1);
  timeline_->add(whole);
  for (std::size_t b = 0; b < backward.buckets.size(); ++b) {
    const BucketState& bucket = backward.buckets[b];
    const auto number = static_cast<std::int32_t>(b);
    Event event = activity(EventKind::kBucket, bucket.ready, bucket.finished, number);
    event.step = whole.step;
    event.bytes = bucket.bytes;
    event.sequence = bucket.parameters;
    timeline_->add(event);
    event = activity(EventKind::kReduction, bucket.started, bucket.finished, number);
    event.bytes = bucket.sent_bytes;
    timeline_->add(event);
  }
  if (write_timeline_after_ == 0 || --write_timeline_after_ > 0) return;
  timeline_->write();
  timeline_.reset();
}

DistributedDataParallelStats StepStats::stats(int rebuilds) const {
  DistributedDataParallelStats stats = stats_;
  stats.rebuilds = rebuilds;
  return stats;
}

void StepStats::set_timeline(std::optional<Timeline> timeline, std::uint64_t write_after) {
  timeline_ = std::move(timeline);
  write_timeline_after_ = write_after;
}

void StepStats::record_wait(std::size_t bucket, Clock::time_point begin, Clock::time_point end) const {
  if (timeline_) timeline_->add(activity(EventKind::kBucketWait, begin, end, static_cast<std::int32_t>(bucket)));
}

}  // namespace ddpkit
