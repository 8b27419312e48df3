#include <ddpkit/comm/timeline.h>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <set>
#include <utility>

#include <ddpkit/error.h>

#include "comm/backend.h"
#include "comm/host.h"
#include "comm/timeline_recorder.h"

namespace ddpkit {
namespace {

using Clock = TimelineRecorder::Clock;

/// Number of exchanges of clock readings. The tightest bounds count.
constexpr int kExchanges = 32;

std::int64_t nanoseconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

/// Identifies the kernel and the time namespace: ranks with the same value share CLOCK_MONOTONIC.
std::string clock_identity() { return fmt::format("{}/{}", boot_id(), namespace_number("time")); }

at::Device exchange_device(const ProcessGroup& group) { return Backend::of(group)->control_device(); }

/// Returns every rank's text on rank 0; nothing on the others. all_gather_bytes() would need memory for all texts on
/// all ranks. [rank]
std::vector<std::string> gather_text(const std::string& text, const ProcessGroup& group) {
  std::vector<std::string> texts;
  const auto sizes = group.all_gather_bytes(std::to_string(text.size()));
  if (group.rank() != 0) {
    const at::Tensor bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
    std::memcpy(bytes.data_ptr(), text.data(), text.size());
    group.send(bytes.to(exchange_device(group)), 0);
    return texts;
  }
  texts.push_back(text);
  for (int rank = 1; rank < group.world_size(); ++rank) {
    const auto size = std::stoll(sizes[static_cast<std::size_t>(rank)]);
    const at::Tensor bytes = at::empty({size}, at::TensorOptions(at::kByte).device(exchange_device(group)));
    group.recv(bytes, rank);
    const at::Tensor on_host = bytes.cpu();
    texts.emplace_back(static_cast<const char*>(on_host.const_data_ptr()), static_cast<std::size_t>(size));
  }
  return texts;
}

/// Throws rank 0's `problem` on all ranks unless it is empty. Collective.
void agree(const std::string& problem, const ProcessGroup& group) {
  const std::string first = group.all_gather_bytes(group.rank() == 0 ? problem : std::string())[0];
  if (!first.empty()) throw InvalidArgument(first);
}

std::string partial_path(const std::string& path) { return path + ".partial"; }

std::string cannot_write(const std::string& path) {
  return fmt::format("the timeline cannot be written to {}: {}", path, std::strerror(errno));
}

/// Writes `parts` to a file. Returns an empty text, or the error.
std::string write_file(const std::string& path, const std::vector<std::string>& parts) {
  const std::string partial = partial_path(path);
  std::ofstream file(partial, std::ios::binary | std::ios::trunc);
  file << "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  for (std::size_t rank = 0; rank < parts.size(); ++rank) file << (rank == 0 ? "\n" : ",\n") << parts[rank];
  file << "\n]}\n";
  file.close();
  if (!file.fail() && std::rename(partial.c_str(), path.c_str()) == 0) return {};
  const std::string problem = cannot_write(path);
  std::remove(partial.c_str());
  return problem;
}

}  // namespace

std::string json_string(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (code < 0x20 || code == 0x7f) {
      quoted += fmt::format("\\u{:04x}", code);
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

ClockOffset clock_offset(const std::vector<ClockReading>& reference, const std::vector<ClockReading>& other) {
  std::int64_t low = std::numeric_limits<std::int64_t>::min(), high = std::numeric_limits<std::int64_t>::max();
  for (std::size_t i = 0; i < reference.size(); ++i) {
    low = std::max(low, reference[i].before_ns - other[i].after_ns);
    high = std::min(high, reference[i].after_ns - other[i].before_ns);
  }
  return {.ns = low + (high - low) / 2, .error_ns = (high - low + 1) / 2};
}

TimelineRecorder::TimelineRecorder(ProcessGroup group, std::string path, const TimelineOptions& options)
    : group_(std::move(group)), path_(std::move(path)), options_(options) {
  check_writable();
  align_clocks();
}

void TimelineRecorder::check_writable() const {
  std::string problem;
  if (group_.rank() == 0) {
    const std::string partial = partial_path(path_);
    if (!std::ofstream(partial)) problem = cannot_write(path_);
    std::remove(partial.c_str());
  }
  agree(problem, group_);
}

void TimelineRecorder::align_clocks() {
  const auto identities = group_.all_gather_bytes(clock_identity());
  const bool one_clock = std::all_of(identities.begin(), identities.end(),
                                     [&](const std::string& identity) { return identity == identities[0]; });
  const int exchanges = one_clock ? 1 : kExchanges;
  const std::int64_t ranks = group_.world_size();
  const at::Tensor readings = at::zeros({exchanges, 2}, at::kLong);  // Before and after. [exchange]
  auto* own = readings.mutable_data_ptr<std::int64_t>();
  for (int i = 0; i < exchanges; ++i) {
    const at::Tensor token = at::zeros({1}, at::TensorOptions(at::kLong).device(exchange_device(group_)));
    own[2 * i] = nanoseconds(Clock::now());
    group_.all_reduce(token);
    token.cpu();  // On a GPU, all_reduce() does not wait.
    own[2 * i + 1] = nanoseconds(Clock::now());
  }
  const at::Tensor all = group_.all_gather(readings.to(exchange_device(group_))).cpu();
  const auto readings_of = [&](std::int64_t rank) {
    std::vector<ClockReading> of_rank;
    for (int i = 0; i < exchanges; ++i)
      of_rank.push_back({all[rank][i][0].item<std::int64_t>(), all[rank][i][1].item<std::int64_t>()});
    return of_rank;
  };
  const auto reference = readings_of(0);
  origin_ns_ = reference[0].before_ns;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const auto of_rank = readings_of(rank);
    const ClockOffset offset = one_clock || rank == 0 ? ClockOffset{} : clock_offset(reference, of_rank);
    if (rank == group_.rank()) offset_ = offset;
    origin_ns_ = std::min(origin_ns_, of_rank[0].before_ns + offset.ns);
  }
}

void TimelineRecorder::add(std::string name, int track, Clock::time_point begin, Clock::time_point end,
                           const TimelineDetails& details) {
  const std::lock_guard lock(mutex_);
  if (events_.size() >= options_.max_events) {
    ++dropped_;
    return;
  }
  events_.push_back({std::move(name), track, begin, end, details});
}

/// Returns this rank's events as JSON objects, ordered by time and separated by commas.
std::string TimelineRecorder::render() const {
  const std::lock_guard lock(mutex_);
  const int rank = group_.rank();
  std::string text;
  const auto out = std::back_inserter(text);
  fmt::format_to(
      out,
      R"({{"name":"process_name","ph":"M","pid":{0},"tid":0,"args":{{"name":"rank {0}"}}}},)"
      "\n"
      R"({{"name":"process_sort_index","ph":"M","pid":{0},"tid":0,"args":{{"sort_index":{0}}}}},)"
      "\n"
      R"({{"name":"ddpkit","ph":"M","pid":{0},"tid":0,"args":{{"dropped_events":{1},"clock_error_us":{2:.3f}}}}})",
      rank, dropped_, static_cast<double>(offset_.error_ns) / 1e3);
  std::set<int> tracks;
  std::vector<const Event*> by_time;
  for (const Event& event : events_) {
    tracks.insert(event.track);
    by_time.push_back(&event);
  }
  // Of two events with the same begin, the longer one comes first, because it encloses the other.
  std::stable_sort(by_time.begin(), by_time.end(), [](const Event* a, const Event* b) {
    return a->begin != b->begin ? a->begin < b->begin : a->end > b->end;
  });
  for (const int track : tracks) {
    fmt::format_to(out,
                   ",\n"
                   R"({{"name":"thread_name","ph":"M","pid":{},"tid":{},"args":{{"name":"{}"}}}})",
                   rank, track, track == kCompute ? std::string("compute") : fmt::format("bucket {}", track - 1));
  }
  for (const Event* event : by_time) {
    const std::int64_t begin = nanoseconds(event->begin), duration = nanoseconds(event->end) - begin;
    fmt::format_to(out,
                   ",\n"
                   R"({{"name":{},"ph":"X","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f},"args":{{)",
                   json_string(event->name), rank, event->track,
                   static_cast<double>(begin + offset_.ns - origin_ns_) / 1e3, static_cast<double>(duration) / 1e3);
    const char* comma = "";
    const auto detail = [&](const char* name, const auto& value) {
      if (!value) return;
      fmt::format_to(out, R"({}"{}":{})", comma, name, *value);
      comma = ",";
    };
    detail("step", event->details.step);
    detail("bytes", event->details.bytes);
    detail("parameters", event->details.parameters);
    text += "}}";
  }
  return text;
}

void TimelineRecorder::write() {
  const auto parts = gather_text(render(), group_);
  agree(group_.rank() == 0 ? write_file(path_, parts) : std::string(), group_);
}

std::size_t TimelineRecorder::events() const {
  const std::lock_guard lock(mutex_);
  return events_.size();
}

std::size_t TimelineRecorder::dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

Timeline::Timeline(ProcessGroup group, std::string path, const TimelineOptions& options)
    : recorder_(std::make_shared<TimelineRecorder>(std::move(group), std::move(path), options)) {}

void Timeline::write() const { recorder_->write(); }
std::size_t Timeline::events() const { return recorder_->events(); }
std::size_t Timeline::dropped() const { return recorder_->dropped(); }

Timeline::Span::Span(std::shared_ptr<TimelineRecorder> recorder, std::string_view name)
    : recorder_(std::move(recorder)), name_(name), begin_(std::chrono::steady_clock::now()) {}

Timeline::Span::~Span() {
  if (!recorder_) return;  // Moved from.
  try {
    recorder_->add(std::move(name_), TimelineRecorder::kCompute, begin_, std::chrono::steady_clock::now());
  } catch (...) {
    // A destructor must not throw. Without memory, the span is dropped.
  }
}

}  // namespace ddpkit
