// Tier 1: ATen/core/Tensor.h. The streams of a DataParallel's replicas. Does nothing on the CPU.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstddef>
#include <optional>
#include <vector>

namespace ddpkit {

/// The first replica on a device uses the caller's current stream there. Each further replica has a separate stream.
/// Gradients are summed on side streams, so a sum that waits for another replica does not delay kernels.
///
/// Order of a step: fork() by the caller, each replica's work within a Scope, join() by the caller.
class ReplicaStreams {
 public:
  explicit ReplicaStreams(const std::vector<c10::Device>& devices);

  bool used() const noexcept { return !devices_.empty(); }
  /// Records the caller's current streams. Later work of the replicas starts after the work queued so far on these
  /// streams.
  void fork();
  /// Starts further work of the last fork().
  void begin() const;
  /// Later work on the caller's streams of the last fork() starts after all queued work of replicas and sums.
  void join() const;
  /// The side stream of the replica's device.
  const c10::Stream& side(std::size_t replica) const { return side_[replica]; }
  /// [distinct device]
  const std::vector<c10::Stream>& sides() const noexcept { return sides_; }

  /// Makes the replica's streams current: its stream on its device, the caller's streams on other devices.
  class Scope {
   public:
    Scope(const ReplicaStreams& streams, std::size_t replica);

   private:
    std::optional<c10::DeviceGuard> device_;
    std::optional<c10::MultiStreamGuard> streams_;
  };

  /// Makes the caller's streams of the last fork() current on any thread. They wait for the queued work of the thread's
  /// streams. At the end, the thread's streams wait for them.
  class CallerScope {
   public:
    explicit CallerScope(const ReplicaStreams& streams);
    ~CallerScope() noexcept(false);

   private:
    std::vector<c10::Stream> outside_, inside_;  ///< [distinct device]
    std::optional<c10::MultiStreamGuard> guard_;
  };

 private:
  c10::Stream current(c10::Device device) const;

  std::vector<c10::Device> devices_;  ///< Empty on the CPU. [replica]
  std::vector<std::size_t> first_;    ///< The first replica on the same device. [replica]
  std::vector<c10::Stream> caller_;   ///< From the last fork(). [replica]
  std::vector<c10::Stream> stream_;   ///< [replica]
  std::vector<c10::Stream> side_;     ///< [replica]
  std::vector<c10::Stream> sides_;    ///< [distinct device]
};

}  // namespace ddpkit
