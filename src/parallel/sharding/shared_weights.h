// Tier 1. One copy of a model's weights for all ranks of a host.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/reducer.h>

#include "parallel/sharding/shard.h"

namespace ddpkit::optim {

/// The parameters of all ranks lie in one piece of shared memory. Users see it through a GuardedView, so that what they
/// write is private to their rank; the optimizer writes to the memory itself, each rank to its slices.
class SharedWeights {
 public:
  /// Whether the group's ranks can share memory: they are on one host, and their backend is `shm`.
  static bool possible(const ProcessGroup& group);

  /// Collective: moves the memory of the parameters, which are dense and the same on all ranks, into shared memory. All
  /// tensors on that memory move along: views of one flat tensor stay views of it. Throws on all ranks if there is too
  /// little memory, or if some of a tensor that moves belongs to no parameter.
  SharedWeights(std::vector<NamedParameter> parameters, ProcessGroup group);

  /// Part of parameter `index` in the shared memory itself: one-dimensional, in the order of its memory.
  at::Tensor slice(std::size_t index, const Shard& shard) const;

  /// Parameter `index` has been given other memory: copies its values here, as this rank's writing, and moves that
  /// memory here. Throws InvalidArgument if some of it belongs to no parameter or to another one.
  void take_back(std::size_t index);

  /// Whether this rank has written to a parameter since the last settle().
  bool is_written() const noexcept;
  /// Collective; returns when all ranks have called it. What all have written to their parameters becomes what the
  /// shared memory holds. Throws InvalidArgument on all ranks when they have not written the same.
  void settle();

 private:
  struct Pages;

  void lay_out();
  void move(const at::Storage& storage, std::size_t offset) const;

  void check_alike(const at::Tensor& written) const;
  void absorb(const at::Tensor& written);
  std::string names_in(std::size_t granule) const;

  std::vector<NamedParameter> parameters_;
  std::vector<std::size_t> offsets_;  ///< In bytes. [param]
  std::size_t bytes_ = 0;
  std::vector<std::pair<at::Storage, std::size_t>> storages_;  ///< What moves, and where to. Empty afterwards.
  ProcessGroup group_;
  std::shared_ptr<Pages> pages_;
  at::Tensor flag_;
};

}  // namespace ddpkit::optim
