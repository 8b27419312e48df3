// Tier 1: ATen/core/Tensor.h. Synchronization of streams on any accelerator. On the CPU, the functions do nothing.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

namespace ddpkit {

/// Later work on `waiter` starts after the work queued so far on `of` has finished. The host does not wait. The streams
/// may belong to different devices.
void stream_waits(const c10::Stream& waiter, const c10::Stream& of);

/// The streams of one device with work on the same memory. For a few streams; not thread-safe.
class StreamSet {
 public:
  explicit StreamSet(c10::Device device);

  /// Returns false on the CPU, which has no streams.
  bool has_streams() const noexcept { return has_streams_; }
  /// Returns the calling thread's current stream of the device; empty on the CPU.
  std::optional<c10::Stream> current() const;

  /// Adds the current stream. Returns whether it was not in the set.
  bool add_current();
  /// The current stream waits for the work queued so far on all other streams of the set.
  void current_waits() const;
  /// The allocator does not reuse the tensor's memory before the streams have finished the work queued so far.
  void keep_alive(const at::Tensor& tensor) const;
  void clear() noexcept { streams_.clear(); }
  const std::vector<c10::Stream>& streams() const noexcept { return streams_; }

 private:
  c10::Device device_;
  bool has_streams_;
  std::vector<c10::Stream> streams_;
};

}  // namespace ddpkit
