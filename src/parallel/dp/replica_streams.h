// Tier 1: ATen/core/Tensor.h. The streams that a DataParallel's replicas compute on; on the CPU nothing does anything.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstddef>
#include <optional>
#include <vector>

namespace ddpkit {

/// The first replica on a device computes on the caller's current stream there, each further one on a stream of its
/// own. Gradients are summed on side streams, so that a sum that waits for another replica holds nobody's kernels up.
///
/// Of a step: fork() by the caller, the replicas' work within a Scope each, join() by the caller.
class ReplicaStreams {
 public:
  explicit ReplicaStreams(const std::vector<c10::Device>& devices);

  bool used() const noexcept { return !devices_.empty(); }
  /// Takes note of the caller's current streams: what replicas are given from now on comes after what those were given.
  void fork();
  /// For further work of the last fork().
  void begin() const;
  /// What the caller's streams of the last fork() are given from now on comes after all that replicas and sums were.
  void join() const;
  /// The side stream of the replica's device.
  const c10::Stream& side(std::size_t replica) const { return side_[replica]; }
  /// [distinct device]
  const std::vector<c10::Stream>& sides() const noexcept { return sides_; }

  /// Within it the replica's streams are current, on each device the caller's otherwise.
  class Scope {
   public:
    Scope(const ReplicaStreams& streams, std::size_t replica);

   private:
    std::optional<c10::DeviceGuard> device_;
    std::optional<c10::MultiStreamGuard> streams_;
  };

  /// Within it the caller's streams of the last fork() are current, in whatever thread: after what that thread's own
  /// have been given, and before what they will be.
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
  std::vector<c10::Stream> caller_;   ///< Of the last fork(). [replica]
  std::vector<c10::Stream> stream_;   ///< [replica]
  std::vector<c10::Stream> side_;     ///< [replica]
  std::vector<c10::Stream> sides_;    ///< [distinct device]
};

}  // namespace ddpkit
