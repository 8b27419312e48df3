// Tier 1. Parameters of which each rank keeps a shard. Their units are gathered when operations use them (ZeRO stage
// 3).
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ddpkit/parallel/bucket_plan.h>

#include "parallel/sharding/gather_stream.h"
#include "parallel/sharding/unit_order.h"
#include "tensor/flat_layout.h"

namespace ddpkit {

/// Parameters of one type. All ranks' shards, one after the other, are a flat tensor of all elements, so a gathered
/// block needs no copy.
struct ShardedBlock {
  std::vector<NamedParameter> parameters;    ///< [position]
  FlatLayout layout;                         ///< In memory order of the parameters.
  std::optional<at::ScalarType> dtype = {};  ///< Gathered, and computed with. Empty: the type of the shards.
  at::Tensor shard = {};                     ///< This rank's. Undefined: of the parameters' values on rank 0.
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
  /// Compared on all ranks before gathers.
  struct Tag {
    static constexpr std::size_t kEndOfBackward = static_cast<std::size_t>(-1);
    std::size_t unit = 0;             ///< Index of the unit that is used now, or kEndOfBackward.
    std::uint64_t updates = 0;        ///< Steps of the optimizer.
    std::vector<std::size_t> wanted;  ///< Units to gather: the used one if it is not whole, then expected ones.
    std::uint64_t reductions = 0;     ///< See ParameterShards::Reductions.
  };

  virtual ~ShardTransport() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// Of the parameters and shards.
  virtual at::Device device() const { return at::kCPU; }
  /// Collective. Writes rank 0's elements of each rank's shard to `shard`. `flat`: all elements on rank 0, undefined on
  /// the other ranks.
  virtual void scatter(const at::Tensor& shard, const at::Tensor& flat) = 0;
  struct Agreement {
    std::size_t wanted = 0;        ///< The number of units at the front of Tag::wanted that all ranks want.
    std::uint64_t reductions = 0;  ///< Started on all ranks.
  };
  /// Collective. Throws CollectiveMismatch on all ranks if they use different units or have made different numbers of
  /// steps, or if only some must gather the used unit.
  virtual Agreement agree(const Tag& tag) = 0;
  /// Collective. Starts to write the shards of all ranks to the flat tensors, after the work on the current stream. The
  /// result makes the stream that is current then wait for the end. [block]
  virtual std::function<void()> start_gather(std::size_t unit, const std::vector<at::Tensor>& flats,
                                             const std::vector<at::Tensor>& shards) = 0;
  /// The other ranks' gathers throw PeerLost with `reason`.
  virtual void abort(const std::string& reason) noexcept = 0;
};

/// At most `window` units are whole or being gathered at the same time, except those that one operation needs together.
/// If another unit is used, the least recently used one is released. A unit that is used again is gathered again, so a
/// wrong guess costs time only.
///
/// When a unit is used, the gathers of the next `prefetch` units start. UnitOrder expects the order of the last step.
/// The collectives of all ranks have the same order, because each depends on the uses and collectives before only.
///
/// On a device, gathers run on a separate stream, and no call waits for the device. A stream that uses a unit waits for
/// its gather.
///
/// Any thread may use the parameters. All ranks must use units in the same order.
class ParameterShards {
 public:
  /// Collective. All ranks get shards of rank 0's parameters, which are dense and do not overlap.
  ParameterShards(std::vector<ShardedUnit> units, std::unique_ptr<ShardTransport> transport, std::size_t window,
                  std::size_t prefetch = 0);
  /// The weights are lost: each later use of a parameter throws InvalidArgument.
  ~ParameterShards();
  ParameterShards(const ParameterShards&) = delete;
  ParameterShards& operator=(const ParameterShards&) = delete;

  /// Reductions of gradients. Their order relative to gathers may differ between ranks. A rank must not wait for a
  /// reduction that another rank has not started, because the other rank may wait for this rank in a gather.
  struct Reductions {
    std::function<std::uint64_t()> started;           ///< Returns the number of reductions that this rank has started.
    std::function<void(std::uint64_t count)> finish;  ///< Called before a gather. All ranks have started `count`.
  };
  void set_reductions(Reductions reductions) { reductions_ = std::move(reductions); }

  /// Returns a view of the parameter's elements in this rank's shard, one-dimensional.
  at::Tensor piece(const at::Tensor& parameter) const;
  /// Returns which elements these are.
  FlatLayout::Range range(const at::Tensor& parameter) const;
  /// Returns the indices of the parameter's unit and of its block in the unit.
  std::pair<std::size_t, std::size_t> block_of(const at::Tensor& parameter) const;

  /// Parameters can be used between enter() and leave(), in forward passes for example. In backward they always can.
  void enter() noexcept { ++scopes_; }
  void leave() noexcept { --scopes_; }
  /// Call before each forward pass, on all ranks.
  void begin_pass();
  /// Collective. Call before the wait for the last reductions: a rank that waits for them does not gather. Throws
  /// CollectiveMismatch on all ranks if another rank uses a unit instead.
  void end_backward();
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
  void after_update() {
    ++updates_;
    gather_stream_.after_write();
  }

  void abort(const std::string& reason) noexcept { transport_->abort(reason); }

  struct UnitStats {
    std::string name;
    std::size_t bytes = 0;  ///< Of the whole unit.
    std::size_t parameters = 0;
    std::uint64_t gathers = 0;
  };
  std::vector<UnitStats> stats() const;  ///< [unit]
  /// Returns the number of units that are whole or being gathered now, and the maximum since the construction; without
  /// units that stay whole.
  std::size_t whole() const { return whole_; }
  std::size_t most_whole() const {
    const std::lock_guard lock(mutex_);
    return most_whole_;
  }

 private:
  class Unit;

  void check_scope(const Unit& unit, const char* operation) const;
  bool moves_to(const Unit& unit) const noexcept;
  void use(Unit& unit);
  std::vector<Unit*> expect();
  void start(const std::vector<Unit*>& wanted, const Unit& used);
  void finish(Unit& unit);
  bool make_room(std::size_t units);
  void trim() noexcept;
  bool release_oldest();
  bool release(Unit& unit);
  const Unit* release_units();
  void free_memory(Unit& unit);
  void adopt(Unit& unit);

  std::unique_ptr<ShardTransport> transport_;
  const std::size_t window_, prefetch_;
  const GatherStream gather_stream_;
  Reductions reductions_;  ///< May be empty.
  /// Recursive: adopting a parameter may read another one.
  mutable std::recursive_mutex mutex_;
  std::vector<std::shared_ptr<Unit>> units_;
  UnitOrder order_;
  std::atomic<const Unit*> current_{nullptr};  ///< The unit used last; a unit that stays whole does not count.
  std::atomic<int> scopes_of_all_{0};          ///< Between gather_all() and release_all(). A rank may use units alone.
  struct Place {
    const Unit* unit = nullptr;
    std::size_t block = 0, position = 0;
  };
  std::unordered_map<const void*, Place> places_;  ///< By TensorImpl.
  std::atomic<int> scopes_{0};
  std::atomic<std::uint64_t> clock_{0};
  std::atomic<std::size_t> whole_{0};  ///< Units that are whole or being gathered, without those that stay whole.
  std::size_t most_whole_ = 0;
  std::uint64_t updates_ = 0;
};

}  // namespace ddpkit
