#include "comm/timeline.h"

#include <ddpkit/comm/trace.h>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <mutex>
#include <set>
#include <utility>

#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>

#include "comm/backend.h"
#include "comm/host.h"
#include "comm/trace/event_ring.h"

namespace ddpkit {
namespace {

using Clock = std::chrono::steady_clock;

/// Number of exchanges of clock readings. The tightest bounds count.
constexpr int kExchanges = 32;

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

/// Track 0 is "compute". Each bucket has a track.
int track_of(const Event& event) {
  return event.kind == EventKind::kBucket || event.kind == EventKind::kReduction ? event.bucket + 1 : 0;
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

std::optional<TimelineRequest> take_timeline_request() {
  static std::atomic<bool> taken{false};
  const char* path = std::getenv("DDPKIT_TIMELINE");
  if (!path || *path == '\0' || taken.exchange(true)) return std::nullopt;
  TimelineRequest request{.path = path};
  if (const char* steps = std::getenv("DDPKIT_TIMELINE_STEPS")) {
    const std::string_view text = steps;
    if (!parse_number(text, request.steps) || request.steps == 0)
      throw InvalidArgument(fmt::format("DDPKIT_TIMELINE_STEPS is \"{}\", but must be a positive number", text));
  }
  return request;
}

void set_step(std::int64_t step) noexcept { EventRing::of_process().set_step(step); }

struct Timeline::Impl {
  struct NamedEvent {
    Event event;
    std::string name;  ///< Of a span.
  };

  void align_clocks();
  void add(const Event& event, std::string name = {});
  std::string render() const;

  const ProcessGroup group;
  const std::string path;
  const TimelineOptions options;
  ClockOffset offset = {};        ///< Relative to rank 0's clock.
  std::int64_t origin_ns = 0;     ///< Time 0 of the file, on rank 0's clock.
  mutable std::mutex mutex = {};  ///< Guards the next members.
  std::vector<NamedEvent> events = {};
  std::size_t dropped = 0;
};

void Timeline::Impl::align_clocks() {
  const auto identities = group.all_gather_bytes(clock_identity());
  const bool one_clock = std::all_of(identities.begin(), identities.end(),
                                     [&](const std::string& identity) { return identity == identities[0]; });
  const int exchanges = one_clock ? 1 : kExchanges;
  const at::Tensor readings = at::zeros({exchanges, 2}, at::kLong);  // Before and after. [exchange]
  auto* own = readings.mutable_data_ptr<std::int64_t>();
  for (int i = 0; i < exchanges; ++i) {
    const at::Tensor token = at::zeros({1}, at::TensorOptions(at::kLong).device(exchange_device(group)));
    own[2 * i] = now_ns();
    group.all_reduce(token);
    token.cpu();  // On a GPU, all_reduce() does not wait.
    own[2 * i + 1] = now_ns();
  }
  const at::Tensor all = group.all_gather(readings.to(exchange_device(group))).cpu();
  const auto readings_of = [&](std::int64_t rank) {
    std::vector<ClockReading> of_rank;
    for (int i = 0; i < exchanges; ++i)
      of_rank.push_back({all[rank][i][0].item<std::int64_t>(), all[rank][i][1].item<std::int64_t>()});
    return of_rank;
  };
  const auto reference = readings_of(0);
  origin_ns = reference[0].before_ns;
  for (std::int64_t rank = 0; rank < group.world_size(); ++rank) {
    const auto of_rank = readings_of(rank);
    const ClockOffset its = one_clock || rank == 0 ? ClockOffset{} : clock_offset(reference, of_rank);
    if (rank == group.rank()) offset = its;
    origin_ns = std::min(origin_ns, of_rank[0].before_ns + its.ns);
  }
}

void Timeline::Impl::add(const Event& event, std::string name) {
  EventRing::of_process().add(event);
  const std::lock_guard lock(mutex);
  if (events.size() >= options.max_events) {
    ++dropped;
    return;
  }
  events.push_back({event, std::move(name)});
}

/// Returns this rank's events as JSON objects, ordered by time and separated by commas.
std::string Timeline::Impl::render() const {
  const std::lock_guard lock(mutex);
  const int rank = group.rank();
  std::string text;
  const auto out = std::back_inserter(text);
  fmt::format_to(
      out,
      R"({{"name":"process_name","ph":"M","pid":{0},"tid":0,"args":{{"name":"rank {0}"}}}},)"
      "\n"
      R"({{"name":"process_sort_index","ph":"M","pid":{0},"tid":0,"args":{{"sort_index":{0}}}}},)"
      "\n"
      R"({{"name":"ddpkit","ph":"M","pid":{0},"tid":0,"args":{{"dropped_events":{1},"clock_error_us":{2:.3f}}}}})",
      rank, dropped, static_cast<double>(offset.error_ns) / 1e3);
  std::set<int> tracks;
  std::vector<const NamedEvent*> by_time;
  for (const NamedEvent& each : events) {
    tracks.insert(track_of(each.event));
    by_time.push_back(&each);
  }
  // Of two events with the same begin, the longer one comes first, because it encloses the other.
  std::stable_sort(by_time.begin(), by_time.end(), [](const NamedEvent* a, const NamedEvent* b) {
    return std::pair(a->event.begin_ns, -a->event.end_ns) < std::pair(b->event.begin_ns, -b->event.end_ns);
  });
  for (const int track : tracks) {
    fmt::format_to(out,
                   ",\n"
                   R"({{"name":"thread_name","ph":"M","pid":{},"tid":{},"args":{{"name":"{}"}}}})",
                   rank, track, track == 0 ? std::string("compute") : fmt::format("bucket {}", track - 1));
  }
  for (const NamedEvent* each : by_time) {
    const Event& event = each->event;
    const std::string name = event.kind == EventKind::kSpan        ? each->name
                             : event.kind == EventKind::kReduction ? name_of(event.kind)
                                                                   : describe(event);
    fmt::format_to(out,
                   ",\n"
                   R"({{"name":{},"ph":"X","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f},"args":{{)",
                   json_string(name), rank, track_of(event),
                   static_cast<double>(event.begin_ns + offset.ns - origin_ns) / 1e3,
                   static_cast<double>(event.end_ns - event.begin_ns) / 1e3);
    if (event.kind == EventKind::kBackward) fmt::format_to(out, R"("step":{})", event.step);
    if (event.kind == EventKind::kReduction) fmt::format_to(out, R"("bytes":{})", event.bytes);
    if (event.kind == EventKind::kBucket)
      fmt::format_to(out, R"("step":{},"bytes":{},"parameters":{})", event.step, event.bytes, event.sequence);
    text += "}}";
  }
  return text;
}

Timeline::Timeline(ProcessGroup group, std::string path, const TimelineOptions& options)
    : impl_(new Impl{std::move(group), std::move(path), options}) {
  std::string problem;
  if (impl_->group.rank() == 0) {
    const std::string partial = partial_path(impl_->path);
    if (!std::ofstream(partial)) problem = cannot_write(impl_->path);
    std::remove(partial.c_str());
  }
  agree(problem, impl_->group);
  impl_->align_clocks();
}

void Timeline::add(const Event& event) const { impl_->add(event); }

void Timeline::write() const {
  const auto parts = gather_text(impl_->render(), impl_->group);
  agree(impl_->group.rank() == 0 ? write_file(impl_->path, parts) : std::string(), impl_->group);
}

std::size_t Timeline::events() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->events.size();
}

std::size_t Timeline::dropped() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->dropped;
}

Timeline::Span::Span(std::shared_ptr<Impl> impl, std::string_view name)
    : impl_(std::move(impl)), name_(name), begin_(Clock::now()) {}

Timeline::Span::~Span() {
  if (!impl_) return;  // Moved from.
  try {
    impl_->add(activity(EventKind::kSpan, begin_, Clock::now()), std::move(name_));
  } catch (...) {
    // A destructor must not throw. Without memory, the span is dropped.
  }
}

}  // namespace ddpkit
