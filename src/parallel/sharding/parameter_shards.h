// Tier 1. Parameters of which each rank keeps a shard. Their units are gathered when operations use them (ZeRO stage
// 3).
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <ddpkit/parallel/bucket_plan.h>

#include "tensor/flat_layout.h"

namespace ddpkit {

/// Parameters of one type. All ranks' shards, one after the other, are a flat tensor of all elements, so a gathered
/// block needs no copy.
struct ShardedBlock {
  std::vector<NamedParameter> parameters;  ///< [position]
  FlatLayout layout;                       ///< In memory order of the parameters.
};

/// Parameters that are gathered together.
struct ShardedUnit {
  std::string name;  ///< Of the module, for errors.
  std::vector<ShardedBlock> blocks;
  bool stays_whole = false;  ///< From its first use to the next step, and not counted by the window.
};

/// Communication of ParameterShards.
class ShardTransport {
 public:
  /// Compared on all ranks before each gather.
  struct Tag {
    std::size_t unit = 0;       ///< Index.
    std::uint64_t updates = 0;  ///< Steps of the optimizer.
  };

  virtual ~ShardTransport() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// Collective. Writes the shards of all ranks to the flat tensors. Throws CollectiveMismatch on all ranks, before any
  /// data moves, if the ranks' tags differ. [block]
  virtual void gather(const Tag& tag, const std::vector<at::Tensor>& flats, const std::vector<at::Tensor>& shards) = 0;
  /// The other ranks' gathers throw PeerLost with `reason`.
  virtual void abort(const std::string& reason) noexcept = 0;
};

/// At most `window` units are whole at the same time, except those that one operation needs together. If another unit
/// is used, the least recently used one is released. A unit that is used again is gathered again, so a wrong guess
/// costs time only.
///
/// Any thread may use the parameters. All ranks must use units in the same order.
class ParameterShards {
 public:
  /// Copies this rank's shards. The parameters have the same values on all ranks, are dense, and do not overlap.
  ParameterShards(std::vector<ShardedUnit> units, std::unique_ptr<ShardTransport> transport, std::size_t window);
  /// The weights are lost: each later use of a parameter throws InvalidArgument.
  ~ParameterShards();
  ParameterShards(const ParameterShards&) = delete;
  ParameterShards& operator=(const ParameterShards&) = delete;

  /// Returns a view of the parameter's elements in this rank's shard, one-dimensional.
  at::Tensor piece(const at::Tensor& parameter) const;
  /// Returns which elements these are.
  FlatLayout::Range range(const at::Tensor& parameter) const;

  /// Parameters can be used between enter() and leave(), in forward passes for example. In backward they always can.
  void enter() noexcept { ++scopes_; }
  void leave() noexcept { --scopes_; }
  /// Collective. Gathers all units, which stay whole until release_all(). Call within enter() and leave().
  void gather_all();
  /// Everything that was written to the parameters reaches the shards, also writes that bypassed the dispatcher.
  void release_all() noexcept;

  /// Copies this rank's part of parameters that have other memory: see GatheredParameter::is_replaced(). Not
  /// collective.
  void adopt();
  /// Releases all units. The shards then have all writes, and may be updated. Throws InvalidArgument within
  /// gather_all().
  void before_update();
  /// The same. Returns false within gather_all().
  bool try_release();
  void after_update() noexcept { ++updates_; }

  void abort(const std::string& reason) noexcept { transport_->abort(reason); }

  struct UnitStats {
    std::string name;
    std::size_t bytes = 0;  ///< Of the whole unit.
    std::size_t parameters = 0;
    std::uint64_t gathers = 0;
  };
  std::vector<UnitStats> stats() const;  ///< [unit]
  /// Returns the number of units that are whole now, and the maximum since the construction; without units that stay
  /// whole.
  std::size_t whole() const;
  std::size_t most_whole() const;

 private:
  class Unit;

  void check_scope(const Unit& unit, const char* operation) const;
  void make_whole(Unit& unit);
  void trim() noexcept;
  bool release_oldest();
  bool release(Unit& unit);
  const Unit* release_units();
  void adopt(Unit& unit);

  std::unique_ptr<ShardTransport> transport_;
  const std::size_t window_;
  /// Recursive: adopting a parameter may read another one.
  mutable std::recursive_mutex mutex_;
  std::vector<std::shared_ptr<Unit>> units_;
  struct Place {
    const Unit* unit = nullptr;
    std::size_t block = 0, position = 0;
  };
  std::unordered_map<const void*, Place> places_;  ///< By TensorImpl.
  std::atomic<int> scopes_{0};
  std::atomic<std::uint64_t> clock_{0};
  std::atomic<std::size_t> whole_{0};
  std::size_t most_whole_ = 0;
  std::uint64_t updates_ = 0;
};

}  // namespace ddpkit
