#include <ddpkit/parallel/fully_sharded_data_parallel.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <type_traits>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "comm/backend.h"
#include "parallel/ddp/reducer.h"
#include "parallel/ddp/replica_groups.h"
#include "parallel/model_agreement.h"
#include "parallel/sharding/gathered_use.h"
#include "parallel/sharding/parameter_shards.h"
#include "parallel/sharding/unit_plan.h"

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
        numbers_(static_cast<std::int64_t>(3 + prefetch)) {}

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
  std::size_t agree(const Tag& tag) override {
    if (world_size() == 1) return tag.wanted.size();
    const at::Tensor own = at::full({numbers_}, -1, at::kLong);
    auto* numbers = own.mutable_data_ptr<std::int64_t>();
    numbers[0] = static_cast<std::int64_t>(tag.unit);
    numbers[1] = static_cast<std::int64_t>(tag.updates);
    std::copy(tag.wanted.begin(), tag.wanted.end(), numbers + 2);
    const at::Tensor all = guarded([&] { return control_.all_gather(own); });
    const auto* first = all.const_data_ptr<std::int64_t>();
    std::size_t agreed = tag.wanted.size();
    for (int r = 1; r < world_size(); ++r) {
      const auto* other = first + r * numbers_;
      try {
        check_same(first, other, r);
      } catch (const CollectiveMismatch&) {
        end_together();
        throw;
      }
      const auto* differs = std::mismatch(first + 2, first + numbers_, other + 2).first;
      agreed = std::min(agreed, static_cast<std::size_t>(differs - (first + 2)));
    }
    return agreed;
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
    if ((first[2] == first[0]) != (other[2] == other[0]))
      fail(fmt::format("unit {} is whole on rank {}, but not on rank {}: call the modules in the same order",
                       name(first[0]), first[2] == first[0] ? r : 0, first[2] == first[0] ? 0 : r));
  }

  ProcessGroup group_;
  std::optional<ProcessGroup> replicas_;
  ProcessGroup gathers_;
  ProcessGroup control_;  ///< On the CPU: the host reads the numbers without a wait for the device.
  std::vector<std::string> unit_names_;
  std::int64_t numbers_;  ///< In a message of agree(): the used unit, the number of steps, the wanted units.
};

std::size_t min_unit_bytes(const FullyShardedOptions& options) {
  if (!(options.min_unit_mb >= 0) || !std::isfinite(options.min_unit_mb))
    throw InvalidArgument(fmt::format("min_unit_mb is {} MiB, but must be 0 or more", options.min_unit_mb));
  return static_cast<std::size_t>(options.min_unit_mb * (1 << 20));
}

/// Returns the number of units to gather ahead. The shm backend moves data only while ranks wait, and then at the speed
/// of memory.
std::size_t prefetch_of(const FullyShardedOptions& options, const ProcessGroup& group) {
  if (options.prefetch < 0)
    throw InvalidArgument(fmt::format("prefetch is {} units, but must be 0 or more", options.prefetch));
  if (group.world_size() == 1 || Backend::of(group)->symmetric_memory()) return 0;
  return static_cast<std::size_t>(options.prefetch);
}

void check_parameter(const std::string& name, const at::Tensor& tensor, at::Device device) {
  const auto refuse = [&](const std::string& reason) {
    throw InvalidArgument(fmt::format("FullyShardedDataParallel: parameter {} {}", name, reason));
  };
  if (GatheredParameter::is_gathered(tensor))
    refuse("is sharded already, by another FullyShardedDataParallel: wrap each module once");
  if (tensor.device() != device || tensor.layout() != at::kStrided)
    refuse(
        fmt::format("is not a dense tensor on {}, the device of the group: move the model there first (model->to"
                    "(group.device()))",
                    device.str()));
  if (!tensor.is_non_overlapping_and_dense()) refuse("is not dense in memory: make it contiguous");
  if (tensor.storage().use_count() > 1)
    refuse("shares its memory with another tensor, which would keep the whole weight: release that tensor, or clone");
}

std::string text_of(const std::optional<at::ScalarType>& dtype) {
  if (!dtype) return "unchanged";
  if (!at::isFloatingType(*dtype))
    throw InvalidArgument(
        fmt::format("precision has the type {}, but must have floating types", c10::toString(*dtype)));
  return c10::toString(*dtype);
}

/// Collective. Throws on all ranks if the models differ, or for a model that cannot be sharded.
std::vector<UnitPlan> agree_on_units(torch::nn::Module& module, const ProcessGroup& group,
                                     const FullyShardedOptions& options) {
  std::vector<UnitPlan> plans;
  check_same_on_all_ranks(group, "FullyShardedDataParallel", [&] {
    const std::size_t min_bytes = min_unit_bytes(options);
    if (options.replicas < 1 || group.world_size() % options.replicas != 0)
      throw InvalidArgument(fmt::format("replicas is {}, but must divide the number of ranks, which is {}",
                                        options.replicas, group.world_size()));
    static_cast<void>(prefetch_of(options, group));
    for (const auto& item : module.named_parameters()) check_parameter(item.key(), item.value(), group.device());
    const auto sparse = sparse_weights(module);
    for (const auto& item : module.named_parameters()) {
      if (sparse.contains(item.value().unsafeGetTensorImpl()))
        throw InvalidArgument(fmt::format(
            "FullyShardedDataParallel: the gradient of parameter {} is sparse, which cannot be sharded: make "
            "the embedding without sparse(true)",
            item.key()));
    }
    plans = plan_units(module, options.units, min_bytes);
    std::string text = fmt::format(
        "units [{}], min_unit_mb {}, reshard_after_forward {}, prefetch {}, replicas {}, param_dtype {}, "
        "reduce_dtype {}, cast_forward_inputs {}\n",
        fmt::join(options.units, ", "), options.min_unit_mb, options.reshard_after_forward, options.prefetch,
        options.replicas, text_of(options.precision.param_dtype), text_of(options.precision.reduce_dtype),
        options.precision.cast_forward_inputs);
    // Shards have the parameters' memory order.
    for (const auto& item : module.named_parameters())
      text += fmt::format("parameter {} with strides [{}]\n", item.key(), fmt::join(item.value().strides(), ", "));
    return text;
  });
  check_same_model(group, "FullyShardedDataParallel", "the model differs between ranks", [&] {
    NamedTensors parameters;
    for (const auto& item : module.named_parameters()) parameters.emplace_back(item.key(), item.value());
    auto lines = describe_model(module, parameters, {});
    // Ranks may have equal parameters in modules of different types.
    for (const UnitPlan& plan : plans) lines.push_back("unit " + plan.name);
    return lines;
  });
  return plans;
}

DistributedDataParallelOptions ddp_options(const FullyShardedOptions& options) {
  return {.broadcast_buffers = options.broadcast_buffers, .find_unused_parameters = options.find_unused_parameters};
}

/// A block has the parameters of one type of a unit. Trained parameters are in a block without frozen ones: the block
/// is a bucket of gradients with the same layout.
ShardedUnit make_unit(UnitPlan plan, const FullyShardedPrecision& precision, int ranks) {
  ShardedUnit unit{.name = std::move(plan.name), .blocks = {}, .stays_whole = plan.is_root};
  std::map<std::pair<bool, at::ScalarType>, std::vector<NamedParameter>> kinds;
  for (NamedParameter& parameter : plan.parameters)
    kinds[{parameter.tensor.requires_grad(), parameter.tensor.scalar_type()}].push_back(std::move(parameter));
  for (auto& [kind, parameters] : kinds) {
    std::vector<std::int64_t> numels;
    for (const NamedParameter& parameter : parameters) numels.push_back(parameter.tensor.numel());
    at::ScalarType dtype = kind.second;
    if (at::isFloatingType(dtype)) dtype = precision.param_dtype.value_or(dtype);
    unit.blocks.push_back({.parameters = std::move(parameters),
                           .layout = make_flat_layout(std::move(numels), c10::elementSize(dtype), ranks),
                           .dtype = dtype});
  }
  return unit;
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
  std::vector<ShardedUnit> units;
  std::vector<std::string> names;
  std::vector<UnitPlan> plans = agree_on_units(module, group, options);
  ReplicaGroups groups = split(group, options.replicas);
  for (UnitPlan& plan : plans) {
    names.push_back(plan.name);
    units.push_back(make_unit(std::move(plan), options.precision, groups.shards.world_size()));
  }
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
