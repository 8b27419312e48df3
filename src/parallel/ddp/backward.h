// Tier 1. The state of one backward of a reducer.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include <ddpkit/comm/process_group.h>

#include "parallel/ddp/replica_groups.h"
#include "tensor/stream_set.h"

namespace ddpkit {

struct BucketState {
  using Time = std::chrono::steady_clock::time_point;

  std::size_t pending = 0;  ///< Expected gradients that have not arrived.
  Work work;
  std::function<at::Tensor()> finish;
  at::Tensor shard;                                       ///< The result, if sharded, until it is delivered.
  StreamSet writers;                                      ///< Streams of the gradients.
  std::optional<c10::Stream> stream = {};                 ///< Stream that started the reduction. Empty on the CPU.
  std::size_t bytes = 0, parameters = 0, sent_bytes = 0;  ///< See BucketStats.
  Time ready, started, finished;                          ///< See BucketStats.

  explicit BucketState(c10::Device device) : writers(device) {}
};

struct Backward {
  using Clock = std::chrono::steady_clock;

  enum class Phase {
    kIdle,
    kReducing,
    kInCommHook,  ///< In kReducing or kShadow: the communication hook is running.
    kShadow,      ///< A backward without gradients, on a rank that has run out of inputs.
  };
  Phase phase = Phase::kIdle;
  std::size_t started = 0;           ///< Buckets are reduced in one order on all ranks, in any order of completion.
  std::size_t finished = 0;          ///< The first bucket whose reduction is not known to be complete.
  std::size_t taken = 0;             ///< The first bucket whose result has not been waited for.
  std::size_t delivered = 0;         ///< The first bucket whose result has not been processed.
  std::vector<BucketState> buckets;  ///< [bucket]
  ReplicaAverage replica_average;
  /// Times when backward reached an output of the forward pass (only with a timeline, and perhaps before kReducing), of
  /// the first and last gradient hook, and when all gradients were reduced.
  Clock::time_point reached_output, first_gradient, last_gradient, end;
};

}  // namespace ddpkit
