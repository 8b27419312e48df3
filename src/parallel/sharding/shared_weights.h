// Tier 1. One copy of a model's weights for all ranks of a host.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/bucket_plan.h>

namespace ddpkit::optim {

/// The parameters of all ranks are in one shared memory segment. The program sees a CopyOnWriteView: its writes are
/// private to its rank. The optimizer writes to the shared memory, each rank to its shards.
class SharedWeights {
 public:
  /// Returns whether the group's ranks can share memory: all ranks are on one host, with backend `shm`.
  static bool possible(const ProcessGroup& group);

  /// Collective: moves the parameters, which are dense and equal on all ranks, to shared memory. All tensors on their
  /// storages move too: views of one flat tensor stay views. Throws on all ranks if there is too little memory, or if
  /// part of a moved tensor belongs to no parameter.
  SharedWeights(std::vector<NamedParameter> parameters, ProcessGroup group);

  /// Returns elements [begin, begin + count) of parameter `index` in the shared memory: one-dimensional, in memory
  /// order.
  at::Tensor piece(std::size_t index, std::int64_t begin, std::int64_t count) const;

  /// Call after parameter `index` has received other memory. Copies its values to the shared memory as writes of this
  /// rank, and moves the parameter back. Throws InvalidArgument if part of the memory belongs to no parameter or to
  /// another parameter.
  void adopt(std::size_t index);

  /// Returns whether this rank has written to a parameter since the last synchronize().
  bool is_written() const noexcept;
  /// Collective; returns after all ranks have called it. Applies the writes of all ranks to the shared memory. Throws
  /// InvalidArgument on all ranks if their writes differ.
  void synchronize();

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
  std::vector<std::pair<at::Storage, std::size_t>> storages_;  ///< To move; their offsets. Empty afterwards.
  ProcessGroup group_;
  std::shared_ptr<Pages> pages_;
  at::Tensor flag_;
};

}  // namespace ddpkit::optim
