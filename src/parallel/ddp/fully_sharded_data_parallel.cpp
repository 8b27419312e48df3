#include <ddpkit/parallel/fully_sharded_data_parallel.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "comm/backend.h"
#include "parallel/ddp/reducer.h"
#include "parallel/ddp/replica_groups.h"
#include "parallel/ddp/sharded_units.h"
#include "parallel/sharding/parameter_shards.h"

namespace ddpkit {

struct ShardedModel {
  std::shared_ptr<ParameterShards> shards;
  ReplicaGroups groups;
};

namespace {

/// Gathers have a separate group. Their order relative to the reductions of gradients may differ between ranks, because
/// ranks may use different parameters of a unit.
class GroupTransport final : public ShardTransport {
 public:
  GroupTransport(ReplicaGroups groups, std::vector<std::string> unit_names, std::size_t prefetch)
      : group_(std::move(groups.shards)),
        replicas_(std::move(groups.replicas)),
        gathers_(separate(group_)),
        control_(group_.device().is_cpu() ? gathers_ : Backend::on_hosts(gathers_)),
        unit_names_(std::move(unit_names)),
        numbers_(static_cast<std::int64_t>(4 + prefetch)) {}

  int rank() const override { return group_.rank(); }
  int world_size() const override { return group_.world_size(); }
  at::Device device() const override { return group_.device(); }

  void scatter(const at::Tensor& shard, const at::Tensor& flat) override {
    if (rank() == 0 && replicas_) replicas_->broadcast(flat.view(at::kByte), 0);
    if (world_size() == 1) {
      shard.copy_(flat);
    } else {
      gathers_.scatter(shard.view(at::kByte), rank() == 0 ? flat.view({world_size(), -1}).view(at::kByte) : flat);
    }
  }

  /// Units may have the same size. Without the comparison, their weights would be mixed.
  Agreement agree(const Tag& tag) override {
    Agreement agreement{.wanted = tag.wanted.size(), .reductions = tag.reductions};
    if (world_size() == 1) return agreement;
    const at::Tensor own = at::full({numbers_}, -1, at::kLong);
    auto* numbers = own.mutable_data_ptr<std::int64_t>();
    numbers[0] = static_cast<std::int64_t>(tag.unit);
    numbers[1] = static_cast<std::int64_t>(tag.updates);
    numbers[2] = static_cast<std::int64_t>(tag.reductions);
    std::copy(tag.wanted.begin(), tag.wanted.end(), numbers + kWanted);
    const at::Tensor all = guarded([&] { return control_.all_gather(own); });
    const auto* first = all.const_data_ptr<std::int64_t>();
    for (int r = 1; r < world_size(); ++r) {
      const auto* other = first + r * numbers_;
      try {
        check_same(first, other, r);
      } catch (const CollectiveMismatch&) {
        end_together();
        throw;
      }
      const auto* differs = std::mismatch(first + kWanted, first + numbers_, other + kWanted).first;
      agreement.wanted = std::min(agreement.wanted, static_cast<std::size_t>(differs - (first + kWanted)));
    }
    for (int r = 0; r < world_size(); ++r)
      agreement.reductions = std::min(agreement.reductions, static_cast<std::uint64_t>(first[r * numbers_ + 2]));
    return agreement;
  }

  std::function<void()> start_gather(std::size_t, const std::vector<at::Tensor>& flats,
                                     const std::vector<at::Tensor>& shards) override {
    std::vector<Work> works;
    for (std::size_t b = 0; b < flats.size(); ++b) {
      if (world_size() == 1) {
        flats[b].copy_(shards[b]);
      } else {  // As bytes: the backends lack types such as float8.
        works.push_back(guarded(
            [&] { return gathers_.all_gather_into_async(flats[b].view(at::kByte), shards[b].view(at::kByte)); }));
      }
    }
    return [this, shards, works = std::move(works)]() mutable {
      for (Work& work : works) guarded([&] { work.wait(); });
    };
  }

  void abort(const std::string& reason) noexcept override {
    gathers_.abort(reason);
    group_.abort(reason);
    if (replicas_) replicas_->abort(reason);
  }

 private:
  static ProcessGroup separate(const ProcessGroup& group) {
    if (group.world_size() == 1) return group;
    std::vector<int> ranks(static_cast<std::size_t>(group.world_size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    return group.split(ranks).value();
  }

  /// The other ranks may wait in the gradients' group.
  template <class Call>
  std::invoke_result_t<const Call&> guarded(const Call& call) {
    try {
      return call();
    } catch (const CollectiveMismatch&) {
      throw;  // All ranks throw it.
    } catch (const std::exception& error) {
      abort(error.what());
      throw;
    }
  }

  /// Returns when all ranks have the numbers of all ranks: a rank that leaves earlier would be lost to the others.
  void end_together() const noexcept {
    try {
      control_.barrier();
    } catch (...) {
      // The others have their numbers too, or have failed.
    }
  }

  /// Compares the numbers of rank 0 and of rank `r`. All ranks throw the same error.
  void check_same(const std::int64_t* first, const std::int64_t* other, int r) const {
    const auto name = [&](std::int64_t unit) { return unit_names_.at(static_cast<std::size_t>(unit)); };
    constexpr auto kEnd = static_cast<std::int64_t>(Tag::kEndOfBackward);
    if ((first[0] == kEnd) != (other[0] == kEnd)) {
      const bool first_ends = first[0] == kEnd;
      throw CollectiveMismatch(
          fmt::format("rank {} is at the end of backward and rank {} uses unit {}: run the same forward and backward "
                      "passes on all ranks, with the same modules",
                      first_ends ? 0 : r, first_ends ? r : 0, name(first_ends ? other[0] : first[0])),
          {.rank = r, .call = "backward"});
    }
    if (first[0] == kEnd) return;
    const auto fail = [&](const std::string& text) { throw CollectiveMismatch(text, {.rank = r, .call = "gather"}); };
    // First: ranks with different numbers of steps also use different units next.
    if (first[1] != other[1])
      fail(fmt::format("rank 0 gathers unit {} after {} optimizer steps and rank {} after {}: call step() on all ranks",
                       name(first[0]), first[1], r, other[1]));
    if (first[0] != other[0])
      fail(
          fmt::format("rank 0 uses unit {} and rank {} uses unit {}, but each gather needs the same unit on all ranks: "
                      "call the modules in the same order",
                      name(first[0]), r, name(other[0])));
    const bool first_gathers = first[kWanted] == first[0], other_gathers = other[kWanted] == other[0];
    if (first_gathers != other_gathers)
      fail(fmt::format("unit {} is whole on rank {}, but not on rank {}: call the modules in the same order",
                       name(first[0]), first_gathers ? r : 0, first_gathers ? 0 : r));
  }

  ProcessGroup group_;
  std::optional<ProcessGroup> replicas_;
  ProcessGroup gathers_;
  ProcessGroup control_;  ///< On the CPU: the host reads the numbers without a wait for the device.
  std::vector<std::string> unit_names_;
  static constexpr std::ptrdiff_t kWanted = 3;
  /// In a message of agree(): the used unit, the number of steps, that of reductions, and from kWanted the wanted
  /// units.
  std::int64_t numbers_;
};

/// Returns the number of units to gather ahead. The shm backend moves data only while ranks wait, and then at the speed
/// of memory.
std::size_t prefetch_of(const FullyShardedOptions& options, const ProcessGroup& group) {
  if (group.world_size() == 1 || Backend::of(group)->symmetric_memory()) return 0;
  return static_cast<std::size_t>(options.prefetch);
}

DistributedDataParallelOptions ddp_options(const FullyShardedOptions& options) {
  return {.broadcast_buffers = options.broadcast_buffers, .find_unused_parameters = options.find_unused_parameters};
}

/// Collective.
ReplicaGroups split(const ProcessGroup& group, int replicas) {
  if (replicas == 1) return {.shards = group, .replicas = std::nullopt};
  const int size = group.world_size() / replicas, place = group.rank() % size;
  std::vector<int> neighbors, counterparts;
  for (int i = 0; i < size; ++i) neighbors.push_back(group.rank() - place + i);
  for (int i = 0; i < replicas; ++i) counterparts.push_back(place + i * size);
  ProcessGroup shards = group.split(neighbors).value();
  return {.shards = std::move(shards), .replicas = group.split(counterparts)};
}

/// Collective.
ShardedModel shard(torch::nn::Module& module, const ProcessGroup& group, const FullyShardedOptions& options) {
  std::vector<ShardedUnit> units = agree_on_units(module, group, options);
  ReplicaGroups groups = split(group, options.replicas);
  std::vector<std::string> names;
  for (const ShardedUnit& unit : units) names.push_back(unit.name);
  const std::size_t prefetch = prefetch_of(options, groups.shards);
  const std::size_t window = options.reshard_after_forward ? 1 + prefetch : std::numeric_limits<std::size_t>::max();
  auto transport = std::make_unique<GroupTransport>(groups, std::move(names), prefetch);
  return {.shards = std::make_shared<ParameterShards>(std::move(units), std::move(transport), window, prefetch),
          .groups = std::move(groups)};
}

}  // namespace

FullyShardedDataParallelBase::FullyShardedDataParallelBase(torch::nn::Module& module, const ProcessGroup& group,
                                                           const FullyShardedOptions& options)
    : FullyShardedDataParallelBase(module, group, options, shard(module, group, options)) {}

FullyShardedDataParallelBase::FullyShardedDataParallelBase(torch::nn::Module& module, const ProcessGroup& group,
                                                           const FullyShardedOptions& options, ShardedModel&& sharded)
    : DistributedDataParallelBase(module, group, ddp_options(options), sharded.shards),
      shards_(std::move(sharded.shards)) {
  if (sharded.groups.replicas) Reducer::Impl::of(reducer()).set_replica_groups(std::move(sharded.groups));
  if (options.precision.cast_forward_inputs) input_dtype_ = options.precision.param_dtype;
  if (options.precision.reduce_dtype) Reducer::Impl::of(reducer()).set_reduce_dtype(*options.precision.reduce_dtype);
}

FullyShardedDataParallelBase::~FullyShardedDataParallelBase() = default;
FullyShardedDataParallelBase::FullyShardedDataParallelBase(FullyShardedDataParallelBase&&) noexcept = default;
FullyShardedDataParallelBase& FullyShardedDataParallelBase::operator=(FullyShardedDataParallelBase&&) noexcept =
    default;

FullyShardedDataParallelBase::Gathering FullyShardedDataParallelBase::gathering() { return {shards_, false}; }
FullyShardedDataParallelBase::Gathering FullyShardedDataParallelBase::whole() { return {shards_, true}; }

FullyShardedDataParallelBase::Gathering FullyShardedDataParallelBase::before_forward() {
  Gathering scope = gathering();
  shards_->begin_pass();
  shards_->adopt();
  DistributedDataParallelBase::before_forward();
  return scope;
}

at::Tensor FullyShardedDataParallelBase::cast_input(const at::Tensor& tensor) const {
  return input_dtype_ && tensor.defined() && tensor.is_floating_point() ? tensor.to(*input_dtype_) : tensor;
}

std::vector<FullyShardedUnit> FullyShardedDataParallelBase::units() const {
  std::vector<FullyShardedUnit> units;
  for (auto& stats : shards_->stats())
    units.push_back({.name = std::move(stats.name),
                     .bytes = stats.bytes,
                     .parameters = stats.parameters,
                     .gathers = stats.gathers});
  return units;
}

void FullyShardedDataParallelBase::join_begin() {
  throw InvalidArgument(
      "join() does not support FullyShardedDataParallel: a rank without inputs would have to gather the units of the "
      "other ranks; give all ranks the same number of batches");
}

FullyShardedDataParallelBase::Gathering::Gathering(std::shared_ptr<ParameterShards> shards, bool whole)
    : shards_(std::move(shards)), whole_(whole) {
  shards_->enter();
  if (!whole_) return;
  try {
    shards_->gather_all();
  } catch (...) {
    shards_->leave();
    throw;
  }
}

FullyShardedDataParallelBase::Gathering::~Gathering() {
  if (!shards_) return;
  if (whole_) shards_->release_all();
  shards_->leave();
}

}  // namespace ddpkit
