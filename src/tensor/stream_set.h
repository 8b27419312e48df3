// Tier 1: ATen/core/Tensor.h. Which stream waits for which, on any accelerator; on the CPU nothing does anything.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

namespace ddpkit {

/// What `of` has been given so far is over before what `waiter` is given from now on begins. The host does not wait.
/// `waiter` and `of` may belong to different devices.
void stream_waits(const c10::Stream& waiter, const c10::Stream& of);

/// The streams of one device that have been given work on the same memory. A set of at most a few; not thread-safe.
class StreamSet {
 public:
  explicit StreamSet(c10::Device device);

  /// False on the CPU, where there are no streams.
  bool has_streams() const noexcept { return has_streams_; }
  /// The calling thread's current stream of the device; empty on the CPU.
  std::optional<c10::Stream> current() const;

  /// Adds the current stream. Whether it is new here.
  bool add_current();
  /// The current stream waits for what all others in the set have been given so far.
  void current_waits() const;
  /// The allocator gives the tensor's memory to nobody else before the streams are done with what they have so far.
  void keep_alive(const at::Tensor& tensor) const;
  void clear() noexcept { streams_.clear(); }
  const std::vector<c10::Stream>& streams() const noexcept { return streams_; }

 private:
  c10::Device device_;
  bool has_streams_;
  std::vector<c10::Stream> streams_;
};

}  // namespace ddpkit
