// Tier 1. The streams of a device on which units are gathered and used. Does nothing on the CPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <optional>

#include "tensor/stream_set.h"

namespace ddpkit {

/// Gathers run on this stream, beside the work on the current stream. It owns the memory of whole units.
class GatherStream {
 public:
  explicit GatherStream(c10::Device device) : device_(device) {
    if (!device.is_cpu())
      stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }
  const std::optional<c10::Stream>& stream() const noexcept { return stream_; }
  /// Call before work that writes to shards is queued on the current stream: gathers may still read the shards.
  void before_write() const {
    if (stream_) stream_waits(*StreamSet(device_).current(), *stream_);
  }
  /// Call after it: later gathers read the new values.
  void after_write() const {
    if (stream_) stream_waits(*stream_, *StreamSet(device_).current());
  }

 private:
  c10::Device device_;
  std::optional<c10::Stream> stream_;
};

/// The streams that have used a unit since it was gathered. Not thread-safe, except is_current().
class UnitUsers {
 public:
  explicit UnitUsers(c10::Device device) : streams_(device) {}

  /// Call when the gather has been queued on the gather stream.
  void start(const GatherStream& gather) {
    if (!gather.stream()) return;
    gathered_.emplace(gather.stream()->device_type());
    gathered_->record(*gather.stream());
  }
  /// Call before work on the unit's memory is queued on the current stream. The stream waits for the gather.
  void add_current() {
    if (streams_.add_current()) gathered_->block(*streams_.current());
    last_ = current_id();
  }
  /// Returns whether the current stream was added last.
  bool is_current() const { return last_ == current_id(); }
  /// The same before the current stream writes to the memory, or reads what the users have written.
  void add_current_writer() {
    add_current();
    streams_.current_waits();
  }
  /// Call before the memory is released. The gather stream waits for the work of all users.
  void end(const GatherStream& gather) {
    for (const c10::Stream& user : streams_.streams()) stream_waits(*gather.stream(), user);
    streams_.clear();
  }

 private:
  c10::StreamId current_id() const {
    const auto stream = streams_.current();
    return stream ? stream->id() : 0;
  }

  std::optional<c10::Event> gathered_;  ///< The end of the gather.
  StreamSet streams_;
  std::atomic<c10::StreamId> last_{0};
};

}  // namespace ddpkit
