// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ddpkit/comm/process_group.h>

namespace ddpkit {

/// A bucket of gradients whose turn it is to be reduced.
struct GradBucket {
  std::size_t index = 0;  ///< From 0, in the order buckets are reduced: the same on all ranks.
  bool is_last = false;
  at::Tensor buffer;                   ///< All of the bucket's gradients of this rank, flat: shape [numel].
  std::vector<at::Tensor> gradients;   ///< Each on its part of the buffer, in its parameter's shape. [position]
  std::vector<at::Tensor> parameters;  ///< [position]
  std::vector<std::string> names;      ///< Of the parameters. [position]
};

/// What a communication hook has begun.
struct PendingReduction {
  Work work = {};  ///< Waited for at the end of backward. May be empty.
  /// Called when `work` is over, bucket by bucket, at the end of backward, on the stream on which the hook ran; may
  /// communicate. Returns the bucket's reduced gradients, the buffer's shape and any floating type, or an undefined
  /// tensor when they are in the buffer. May be empty.
  std::function<at::Tensor()> finish = {};
  /// What this rank hands to collectives for the bucket, `finish` included, in bytes: for stats(). Empty: the buffer's.
  std::optional<std::size_t> sent_bytes = {};
};

/// Reduces gradients in place of the all-reduce: torch.distributed.algorithms.ddp_comm_hooks of Python, in C++. Called
/// once a bucket and backward as soon as the bucket is full, on a thread of autograd's and, on a GPU, a stream that
/// waits for the bucket's gradients; it must not wait for other ranks. What ends up in the bucket has to be the same on
/// all ranks, and should be the mean of the ranks' gradients.
using CommHook = std::function<PendingReduction(GradBucket& bucket)>;

}  // namespace ddpkit
