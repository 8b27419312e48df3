// Tier 2: autograd. The sum of the replicas' gradients, computed while the backwards of the replicas run.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "parallel/autograd/gradient_hooks.h"
#include "parallel/dp/replica_streams.h"

namespace ddpkit {

/// Hooks on the replicas' gradient accumulators count the gradients of each bucket. A bucket is summed when all
/// replicas have computed its gradients. Each element is summed in replica order, so results are bitwise reproducible.
///
/// A step calls begin(), then take_part() in the thread of each replica, then sum() for each parameter, then drop().
class GradientSum {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// `leaves`: the trained parameters of each replica. [replica][param]
  GradientSum(std::vector<Tensors> leaves, const ReplicaStreams& streams, std::size_t first_bucket_bytes,
              std::size_t bucket_bytes);
  virtual ~GradientSum() = default;
  GradientSum(const GradientSum&) = delete;
  GradientSum& operator=(const GradientSum&) = delete;

  /// [replica][param]
  const std::vector<Tensors>& leaves() const noexcept { return leaves_; }
  const std::vector<std::vector<std::size_t>>& buckets() const noexcept { return plan_; }

  /// The first `active` replicas take part. No replica may have a gradient.
  virtual void begin(int active);
  /// `work` calls start_backward() just before backward. Returns when nothing is left to sum. Returns without a sum if
  /// a replica has failed.
  void take_part(int replica, const std::function<void()>& work);
  void start_backward(int replica) { counting_[static_cast<std::size_t>(replica)].on = active_ > 1; }

  /// Undefined if no replica has a gradient.
  const at::Tensor& sum(std::size_t param) const { return slots_[param].sum; }
  /// Removes all gradients.
  virtual void drop() noexcept;

 protected:
  struct Slot {
    std::size_t bucket = 0;
    Tensors gradients;  ///< The defined gradients, in replica order.
    at::Tensor sum;     ///< When the bucket is ready: the first gradient, until sum_bucket() replaces it.
  };

  /// Called for each new gradient, in the replica's thread or in autograd's thread of the replica's device.
  virtual void note_gradient(std::size_t replica, std::size_t param, const at::Tensor& added) = 0;
  /// Called with the lock held when all gradients of the bucket exist or will never arrive.
  virtual void sum_bucket(std::size_t bucket) = 0;
  /// Sums one of `parts_left_`, which sum_bucket() has left for the threads of all replicas.
  virtual void sum_part() {}

  const ReplicaStreams& streams_;
  std::vector<Tensors> leaves_;                 ///< [replica][param]
  std::vector<std::vector<std::size_t>> plan_;  ///< [bucket][position]
  std::vector<Slot> slots_;                     ///< [param]
  int active_ = 0;

  std::mutex mutex_;  ///< Protects the buckets' `ready`, the slots, and the members below.
  std::condition_variable changed_;
  std::atomic<std::size_t> parts_left_{0};
  bool failed_ = false;

 private:
  struct Bucket {
    std::atomic<std::size_t> pending{0};
    bool ready = false;
  };
  struct alignas(64) Counting {
    bool on = false;
    std::vector<bool> fired;  ///< [param]
  };

  void on_gradient(std::size_t replica, std::size_t param, const at::Tensor& added);
  void make_ready(std::size_t bucket);
  void finish(bool failed);

  std::vector<Bucket> buckets_;     ///< [bucket]
  std::vector<Counting> counting_;  ///< One thread uses an element at a time. [replica]
  int finished_ = 0;
  std::vector<GradientHooks> hooks_;  ///< [replica]
};

/// The arguments are those of the constructor.
using MakeGradientSum = std::unique_ptr<GradientSum>(std::vector<GradientSum::Tensors> leaves,
                                                     const ReplicaStreams& streams, std::size_t first_bucket_bytes,
                                                     std::size_t bucket_bytes);
/// A bucket is split into chunks. Each later hook sums one chunk. Each replica also sums chunks after its backward, so
/// the last replica does not do all of the work.
MakeGradientSum make_cpu_gradient_sum;
/// The last gradient of a bucket queues the sum of the bucket on side streams. The caller's streams may read sums after
/// ReplicaStreams::join().
MakeGradientSum make_device_gradient_sum;

/// Returns the sum of the defined gradients, in their order, on `device`, computed on the current streams.
at::Tensor sum_on_first(const std::vector<at::Tensor>& gradients, c10::Device device);

}  // namespace ddpkit
