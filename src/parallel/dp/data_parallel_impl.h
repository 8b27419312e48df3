// Tier 2: torch/nn/module.h. What data_parallel.cpp and data_parallel_backward.cpp share.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <ddpkit/parallel/data_parallel.h>

#include "comm/arena.h"
#include "parallel/dp/replica_set.h"
#include "parallel/dp/replica_streams.h"
#include "parallel/dp/replica_threads.h"
#include "parallel/dp/replicas_backward.h"

namespace ddpkit {

class DataParallelBase::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options);

  void replicate();
  Tensors run_forward(const Tensors& inputs, const std::function<Tensors(int, const Tensors&)>& forward);
  at::Tensor run_step(const Tensors& batch, const std::function<at::Tensor(int, const Tensors&)>& loss);
  /// Gradients of the call's wanted inputs, then of its parameters.
  Tensors run_backward(const ReplicasCall& call, const Tensors& gradients, bool keep_graph);
  Tensors run_backward_on_devices(const ReplicasCall& call, const Tensors& gradients, bool keep_graph);

  std::vector<c10::Device> devices;
  int threads_each;
  ReplicaStreams streams;
  std::shared_ptr<ArenaLease> arena;
  std::shared_ptr<ReplicaSet> set;

 private:
  void follow() {
    if (!set->follow(broadcast_buffers_)) replicate();
  }
  void run_replicas(std::size_t count, const std::function<void(int)>& job);
  Tensors with_graph(Tensors outputs, const Tensors& inputs, ReplicasCall call);

  std::shared_ptr<torch::nn::Module> module_;
  std::size_t first_bucket_bytes_;
  std::size_t bucket_bytes_;
  bool broadcast_buffers_;
  std::mutex mutex_;  ///< One call at a time, also where backwards run in several threads.
  ReplicaThreads threads_;
};

}  // namespace ddpkit
