#include <ddpkit/parallel/fully_sharded_data_parallel.h>

#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "parallel/ddp/reducer.h"
#include "parallel/model_agreement.h"
#include "parallel/sharding/gathered_use.h"
#include "parallel/sharding/parameter_shards.h"
#include "parallel/sharding/unit_plan.h"

namespace ddpkit {
namespace {

/// Gathers have a separate group. Their order relative to the reductions of gradients may differ between ranks, because
/// ranks may use different parameters of a unit.
class GroupTransport final : public ShardTransport {
 public:
  GroupTransport(ProcessGroup group, std::vector<std::string> unit_names)
      : group_(std::move(group)), gathers_(separate(group_)), unit_names_(std::move(unit_names)) {}

  int rank() const override { return group_.rank(); }
  int world_size() const override { return group_.world_size(); }

  void gather(const Tag& tag, const std::vector<at::Tensor>& flats, const std::vector<at::Tensor>& shards) override {
    if (world_size() == 1) {
      for (std::size_t b = 0; b < flats.size(); ++b) flats[b].copy_(shards[b]);
      return;
    }
    try {
      check_same(tag);
      // As bytes: the backends lack types such as float8.
      for (std::size_t b = 0; b < flats.size(); ++b)
        gathers_.all_gather_into(flats[b].view(at::kByte), shards[b].view(at::kByte));
    } catch (const CollectiveMismatch&) {
      throw;  // All ranks throw it.
    } catch (const std::exception& error) {
      abort(error.what());  // The other ranks may wait in the gradients' group.
      throw;
    }
  }

  void abort(const std::string& reason) noexcept override {
    gathers_.abort(reason);
    group_.abort(reason);
  }

 private:
  static ProcessGroup separate(const ProcessGroup& group) {
    if (group.world_size() == 1) return group;
    std::vector<int> ranks(static_cast<std::size_t>(group.world_size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    return group.split(ranks).value();
  }

  /// Units may have the same size. Without this check, their weights would be mixed.
  void check_same(const Tag& tag) const {
    const at::Tensor own = at::empty({2}, at::kLong);
    auto* numbers = own.mutable_data_ptr<std::int64_t>();
    numbers[0] = static_cast<std::int64_t>(tag.unit);
    numbers[1] = static_cast<std::int64_t>(tag.updates);
    const at::Tensor all = gathers_.all_gather(own);
    const auto* first = all.const_data_ptr<std::int64_t>();
    for (int r = 1; r < world_size(); ++r) {
      const auto* other = first + 2 * r;
      if (first[0] != other[0])
        throw CollectiveMismatch(
            fmt::format(
                "rank 0 uses unit {} and rank {} uses unit {}, but each gather needs the same unit on all ranks: "
                "call the modules in the same order",
                unit_names_.at(static_cast<std::size_t>(first[0])), r,
                unit_names_.at(static_cast<std::size_t>(other[0]))),
            {.rank = r, .call = "gather"});
      if (first[1] != other[1])
        throw CollectiveMismatch(
            fmt::format(
                "rank 0 gathers unit {} after {} optimizer steps and rank {} after {}: call step() on all ranks",
                unit_names_.at(static_cast<std::size_t>(first[0])), first[1], r, other[1]),
            {.rank = r, .call = "gather"});
    }
  }

  ProcessGroup group_, gathers_;
  std::vector<std::string> unit_names_;
};

std::size_t min_unit_bytes(const FullyShardedOptions& options) {
  if (!(options.min_unit_mb >= 0) || !std::isfinite(options.min_unit_mb))
    throw InvalidArgument(fmt::format("min_unit_mb is {} MiB, but must be 0 or more", options.min_unit_mb));
  return static_cast<std::size_t>(options.min_unit_mb * (1 << 20));
}

void check_parameter(const std::string& name, const at::Tensor& tensor) {
  const auto refuse = [&](const char* reason) {
    throw InvalidArgument(fmt::format("FullyShardedDataParallel: parameter {} {}", name, reason));
  };
  if (GatheredParameter::is_gathered(tensor))
    refuse("is sharded already, by another FullyShardedDataParallel: wrap each module once");
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided)
    refuse("is not a dense tensor on the CPU: only those are supported");
  if (!tensor.is_non_overlapping_and_dense()) refuse("is not dense in memory: make it contiguous");
  if (tensor.storage().use_count() > 1)
    refuse("shares its memory with another tensor, which would keep the whole weight: release that tensor, or clone");
}

/// Collective. Throws InvalidArgument on all ranks for a model that cannot be sharded.
torch::nn::Module& checked(torch::nn::Module& module, const ProcessGroup& group, const FullyShardedOptions& options) {
  check_same_on_all_ranks(group, "FullyShardedDataParallel", [&] {
    if (!group.device().is_cpu())
      throw InvalidArgument(
          fmt::format("FullyShardedDataParallel supports groups on the CPU only, not on {}", group.device().str()));
    const std::size_t min_bytes = min_unit_bytes(options);
    for (const auto& item : module.named_parameters()) check_parameter(item.key(), item.value());
    const auto sparse = sparse_weights(module);
    for (const auto& item : module.named_parameters()) {
      if (sparse.contains(item.value().unsafeGetTensorImpl()))
        throw InvalidArgument(fmt::format(
            "FullyShardedDataParallel: the gradient of parameter {} is sparse, which cannot be sharded: make "
            "the embedding without sparse(true)",
            item.key()));
    }
    static_cast<void>(plan_units(module, options.units, min_bytes));
    std::string text = fmt::format("units [{}], min_unit_mb {}, reshard_after_forward {}\n",
                                   fmt::join(options.units, ", "), options.min_unit_mb, options.reshard_after_forward);
    // Shards have the parameters' memory order.
    for (const auto& item : module.named_parameters())
      text += fmt::format("parameter {} with strides [{}]\n", item.key(), fmt::join(item.value().strides(), ", "));
    return text;
  });
  return module;
}

DistributedDataParallelOptions ddp_options(const FullyShardedOptions& options) {
  return {.broadcast_buffers = options.broadcast_buffers, .find_unused_parameters = options.find_unused_parameters};
}

/// Collective. A unit has one bucket of gradients per type, and a block of weights with the layout of this bucket.
/// Frozen parameters have separate blocks.
std::vector<ShardedUnit> make_units(std::vector<UnitPlan> plans, Reducer& reducer, int ranks) {
  std::unordered_map<const void*, std::size_t> unit_of_parameter;
  for (std::size_t u = 0; u < plans.size(); ++u) {
    for (const NamedParameter& parameter : plans[u].parameters)
      unit_of_parameter[parameter.tensor.unsafeGetTensorImpl()] = u;
  }
  auto& impl = Reducer::Impl::of(reducer);
  const auto& trained = impl.parameters();
  std::vector<std::size_t> unit_of;
  for (const NamedParameter& parameter : trained)
    unit_of.push_back(unit_of_parameter.at(parameter.tensor.unsafeGetTensorImpl()));
  const std::vector<FlatLayout> layouts = impl.use_units(unit_of);
  std::vector<ShardedUnit> units;
  for (const UnitPlan& plan : plans) units.push_back({.name = plan.name, .blocks = {}, .stays_whole = plan.is_root});
  for (std::size_t b = 0; b < impl.plan.size(); ++b) {
    ShardedBlock block{.parameters = {}, .layout = layouts[b]};
    for (const std::size_t index : impl.plan[b]) {
      block.parameters.push_back(trained[index]);
      unit_of_parameter.erase(trained[index].tensor.unsafeGetTensorImpl());
    }
    units[unit_of[impl.plan[b][0]]].blocks.push_back(std::move(block));
  }
  for (std::size_t u = 0; u < plans.size(); ++u) {
    std::map<at::ScalarType, std::vector<NamedParameter>> frozen;
    for (NamedParameter& parameter : plans[u].parameters) {
      if (unit_of_parameter.contains(parameter.tensor.unsafeGetTensorImpl()))
        frozen[parameter.tensor.scalar_type()].push_back(std::move(parameter));
    }
    for (auto& [dtype, parameters] : frozen) {
      std::vector<std::int64_t> numels;
      for (const NamedParameter& parameter : parameters) numels.push_back(parameter.tensor.numel());
      units[u].blocks.push_back({.parameters = std::move(parameters),
                                 .layout = make_flat_layout(std::move(numels), c10::elementSize(dtype), ranks)});
    }
  }
  return units;
}

}  // namespace

FullyShardedDataParallelBase::FullyShardedDataParallelBase(torch::nn::Module& module, const ProcessGroup& process_group,
                                                           const FullyShardedOptions& options)
    : DistributedDataParallelBase(checked(module, process_group, options), process_group, ddp_options(options)) {
  auto plans = plan_units(module, options.units, min_unit_bytes(options));
  std::vector<std::string> names;
  for (const UnitPlan& plan : plans) names.push_back(plan.name);
  // Ranks may have equal parameters in modules of different types.
  check_same_on_all_ranks(group(), "FullyShardedDataParallel",
                          [&] { return fmt::format("units\n{}", fmt::join(names, "\n")); });
  auto units = make_units(std::move(plans), reducer(), group().world_size());
  const std::size_t window = options.reshard_after_forward ? 1 : std::numeric_limits<std::size_t>::max();
  shards_ = std::make_shared<ParameterShards>(std::move(units),
                                              std::make_unique<GroupTransport>(group(), std::move(names)), window);
  Reducer::Impl::of(reducer()).set_parameter_shards(shards_);
}

FullyShardedDataParallelBase::~FullyShardedDataParallelBase() = default;
FullyShardedDataParallelBase::FullyShardedDataParallelBase(FullyShardedDataParallelBase&&) noexcept = default;
FullyShardedDataParallelBase& FullyShardedDataParallelBase::operator=(FullyShardedDataParallelBase&&) noexcept =
    default;

FullyShardedDataParallelBase::Gathering FullyShardedDataParallelBase::gathering() { return {shards_, false}; }
FullyShardedDataParallelBase::Gathering FullyShardedDataParallelBase::whole() { return {shards_, true}; }

FullyShardedDataParallelBase::Gathering FullyShardedDataParallelBase::before_forward() {
  Gathering scope = gathering();
  DistributedDataParallelBase::before_forward();
  return scope;
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
