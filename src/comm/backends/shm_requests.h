// Tier 2: c10d's Types.hpp. Requests of the shm engine for tensors.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <vector>

#include "comm/shm/engine.h"

namespace ddpkit {

/// Makes the requests of one rank, which keep their tensors alive. Throws InvalidArgument for tensors that do not fit
/// the call. Starts nothing.
class ShmRequests {
 public:
  using Tensors = std::vector<at::Tensor>;

  ShmRequests(int rank, int world_size) : rank_(rank), size_(world_size) {}

  shm::CollectiveArgs all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) const;
  /// Without a copy of `tensor`'s handle, for a call that waits for the end. `tensor` is contiguous.
  shm::CollectiveArgs dense_all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) const;
  shm::CollectiveArgs reduce(const at::Tensor& tensor, std::int64_t root, const c10d::ReduceOp& op) const;
  shm::CollectiveArgs broadcast(const at::Tensor& tensor, std::int64_t root) const;
  /// Like dense_all_reduce().
  shm::CollectiveArgs dense_broadcast(const at::Tensor& tensor, int root) const;
  /// One output per rank.
  shm::CollectiveArgs all_gather(const Tensors& outputs, const at::Tensor& input, const char* call) const;
  /// `output`: the parts of all ranks.
  shm::CollectiveArgs all_gather(const at::Tensor& output, const at::Tensor& input) const;
  /// Does not keep the tensors. `input` is contiguous.
  shm::CollectiveArgs dense_all_gather(const at::Tensor& output, const at::Tensor& input) const;
  shm::CollectiveArgs gather(const std::vector<Tensors>& outputs, const at::Tensor& input, std::int64_t root) const;
  shm::CollectiveArgs scatter(const at::Tensor& output, const std::vector<Tensors>& inputs, std::int64_t root) const;
  /// One input per rank.
  shm::CollectiveArgs reduce_scatter(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op) const;
  /// `input`: the parts of all ranks.
  shm::CollectiveArgs reduce_scatter(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) const;
  /// Does not keep the tensors. `input` is contiguous. `dense_output`: contiguous memory for the result.
  shm::CollectiveArgs dense_reduce_scatter(const at::Tensor& output, void* dense_output, const at::Tensor& input,
                                           const c10d::ReduceOp& op) const;
  /// Checks that `stacked` holds one part per rank. The functions for dense tensors do not.
  void check_stacked(const at::Tensor& stacked, const at::Tensor& part, const char* call) const;
  shm::CollectiveArgs all_to_all(const Tensors& outputs, const Tensors& inputs) const;
  /// Returns the parts of a tensor of all_to_all; empty `sizes` divide evenly. `name`: for messages.
  Tensors split(const at::Tensor& tensor, std::vector<std::int64_t> sizes, const char* name) const;
  /// Reduces tensors in symmetric memory in place. With a `shard`, a reduce-scatter.
  std::vector<shm::CollectiveArgs> coalesced(const Tensors& tensors, const at::Tensor& shard,
                                             const c10d::ReduceOp& op) const;
  shm::MessageHandle send(const at::Tensor& tensor, int destination, int tag) const;
  /// `source`: a rank, or shm::kAnySource.
  shm::MessageHandle receive(const at::Tensor& tensor, int source, int tag) const;

 private:
  void check_message(int peer, int tag, const char* call) const;

  int rank_, size_;
};

}  // namespace ddpkit
