// Tier 2: autograd. The sum of the replicas' gradients, formed while their backwards run.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "parallel/autograd/gradient_hooks.h"
#include "tensor/stream_set.h"

namespace ddpkit {

class ReplicaStreams;

/// Hooks on the replicas' gradient accumulators count each bucket's gradients. When all replicas have made those of a
/// bucket it is cut into chunks, which any replica's thread sums, one at each later hook and all that are left after
/// its backward: so that the replica that comes last is not left alone with the work. Element by element in the order
/// of the replicas, whoever sums: the bits are always the same.
///
/// On devices there are no chunks: the last gradient of a bucket to come queues the bucket's sum on the device, see
/// replica_gradients_device.cpp. Sums are there for the caller's streams after ReplicaStreams::join().
///
/// begin(), then take_part() in each replica's thread, then sum() of each parameter and drop().
class ReplicaGradients {
 public:
  /// `leaves`: the parameters that want a gradient, of each replica. [replica][param]
  ReplicaGradients(std::vector<std::vector<at::Tensor>> leaves, const ReplicaStreams& streams,
                   std::size_t first_bucket_bytes, std::size_t bucket_bytes);
  ReplicaGradients(const ReplicaGradients&) = delete;
  ReplicaGradients& operator=(const ReplicaGradients&) = delete;

  /// [replica][param]
  const std::vector<std::vector<at::Tensor>>& leaves() const noexcept { return leaves_; }
  const std::vector<std::vector<std::size_t>>& buckets() const noexcept { return plan_; }

  /// The first `active` replicas take part. None may have a gradient.
  void begin(int active);
  /// `work` calls start_backward() just before backward. Returns when there is nothing left to sum; when a replica
  /// has failed, without having summed.
  void take_part(int replica, const std::function<void()>& work);
  void start_backward(int replica) { counting_[static_cast<std::size_t>(replica)].on = active_ > 1; }

  /// The sum; undefined where no replica has a gradient.
  const at::Tensor& sum(std::size_t param) const { return slots_[param].sum; }
  /// Leaves no gradient anywhere.
  void drop() noexcept;

 private:
  struct Slot {
    std::size_t bucket = 0;
    std::vector<at::Tensor> gradients;  ///< Those there are, in the order of replicas.
    bool alone = false;                 ///< Nothing else lies in the memory of replica 0's.
    at::Tensor sum;                     ///< When the bucket is ready: where the sum is formed, if it can, the first.
  };
  struct Bucket {
    std::atomic<std::size_t> pending{0};
    bool ready = false;
    std::vector<StreamSet> writers = {};  ///< On which gradients came. [replica]
  };
  struct Piece {
    std::size_t param = 0;
    std::int64_t begin = 0;
    std::int64_t count = 0;  ///< Elements; 0: whole, by LibTorch's own addition.
  };
  using Chunk = std::vector<Piece>;
  struct alignas(64) Counting {
    bool on = false;
    std::vector<bool> fired;  ///< [param]
  };

  bool on_device() const noexcept;
  void note_stream(std::size_t replica, std::size_t bucket);
  void sum_on_device(std::size_t bucket);
  bool sum_by_nccl(const std::vector<std::size_t>& params);
  void on_gradient(std::size_t replica, std::size_t param, const at::Tensor& added);
  void make_ready(std::size_t bucket);
  void finish(bool failed);
  void sum_one_chunk();
  void sum_piece(const Piece& piece);

  const ReplicaStreams& streams_;
  std::vector<std::vector<at::Tensor>> leaves_;  ///< [replica][param]
  std::vector<std::vector<std::size_t>> plan_;   ///< [bucket][position]
  std::vector<Slot> slots_;                      ///< [param]
  std::vector<Bucket> buckets_;                  ///< [bucket]
  std::vector<Counting> counting_;               ///< Each touched by one thread at a time. [replica]
  int active_ = 0;

  std::mutex mutex_;  ///< Of what follows, buckets' `ready` and slots.
  std::condition_variable changed_;
  std::deque<Chunk> chunks_;
  std::atomic<std::size_t> chunk_count_{0};
  int finished_ = 0;
  bool failed_ = false;

  std::vector<GradientHooks> hooks_;  ///< [replica]
};

/// Of those that are defined, on `device`, in their order, by the current streams.
at::Tensor sum_on_first(const std::vector<at::Tensor>& gradients, c10::Device device);

}  // namespace ddpkit
