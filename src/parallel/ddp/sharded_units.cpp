#include "parallel/ddp/sharded_units.h"

#include <ATen/ATen.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "comm/backend.h"
#include "parallel/model_agreement.h"
#include "parallel/sharding/gathered_use.h"
#include "parallel/sharding/unit_plan.h"
#include "tensor/tensor_memory.h"

namespace ddpkit {
namespace {

/// glibc allocates large blocks in separate mappings, and returns them to the system when they are freed. But it raises
/// the limit to the size of the largest freed block. Then units and gradients are allocated between small tensors, and
/// a rank needs several times the memory of its tensors.
void return_freed_units() {
  [[maybe_unused]] constexpr int kLargeBlock = 1 << 20;
#ifdef __GLIBC__
  const char* tunables = std::getenv("GLIBC_TUNABLES");
  if (std::getenv("MALLOC_MMAP_THRESHOLD_") || (tunables && std::strstr(tunables, "mmap_threshold"))) return;
  ::mallopt(M_MMAP_THRESHOLD, kLargeBlock);
#endif
}

std::size_t min_unit_bytes(const FullyShardedOptions& options) {
  if (!(options.min_unit_mb >= 0) || !std::isfinite(options.min_unit_mb))
    throw InvalidArgument(fmt::format("min_unit_mb is {} MiB, but must be 0 or more", options.min_unit_mb));
  return static_cast<std::size_t>(options.min_unit_mb * (1 << 20));
}

void check_parameter(const std::string& name, const at::Tensor& tensor, at::Device device) {
  const auto refuse = [&](const std::string& reason) {
    throw InvalidArgument(fmt::format("FullyShardedDataParallel: parameter {} {}", name, reason));
  };
  if (GatheredParameter::is_gathered(tensor))
    refuse("is sharded already: call FullyShardedDataParallel or fully_shard() once for each module");
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

/// Returns the ranks that share a copy of the model.
int ranks_of_copy(const ProcessGroup& group, const FullyShardedOptions& options) {
  if (Backend::of(group)->is_elastic())
    throw InvalidArgument(
        "FullyShardedDataParallel does not support a group with InitOptions::elastic: the shards of a lost rank would "
        "be lost with it. Use DistributedDataParallel with ShardedOptimizer");
  if (options.replicas < 1 || group.world_size() % options.replicas != 0)
    throw InvalidArgument(fmt::format("replicas is {}, but must divide the number of ranks, which is {}",
                                      options.replicas, group.world_size()));
  return group.world_size() / options.replicas;
}

void check_parameters(const torch::nn::Module& module, at::Device device) {
  const auto sparse = sparse_weights(module);
  for (const auto& item : module.named_parameters()) {
    if (!GatheredParameter::kept_by(item.value())) check_parameter(item.key(), item.value(), device);
    if (sparse.contains(item.value().unsafeGetTensorImpl()))
      throw InvalidArgument(
          fmt::format("FullyShardedDataParallel: the gradient of parameter {} is sparse, which cannot be sharded: make "
                      "the embedding without sparse(true)",
                      item.key()));
  }
}

/// Returns the properties of a module and of the options that fix the layout of shards. Shards have the parameters'
/// memory order.
std::string describe_layout(const torch::nn::Module& module, const FullyShardedOptions& options) {
  std::string text = fmt::format("replicas {}, param_dtype {}, reduce_dtype {}\n", options.replicas,
                                 text_of(options.precision.param_dtype), text_of(options.precision.reduce_dtype));
  for (const auto& item : module.named_parameters())
    text += fmt::format("parameter {} with strides [{}]\n", item.key(), fmt::join(item.value().strides(), ", "));
  return text;
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

/// The unit of fully_shard(). Its parameters keep it until FullyShardedDataParallel makes a unit of its shards.
class BuiltUnit final : public GatheredMemory {
 public:
  struct Block {
    std::vector<std::string> names;  ///< In the module of fully_shard(). [position]
    FlatLayout layout;
    at::ScalarType dtype;
    bool requires_grad;
    at::Tensor shard;
  };
  BuiltUnit(std::vector<Block> all, int rank_count) : blocks(std::move(all)), ranks(rank_count) {}

  void acquire(const char* operation, bool) override {
    throw InvalidArgument(
        fmt::format("parameter {} is sharded by fully_shard(), and {} used it: initialize the parameters before "
                    "fully_shard(), and pass the whole model to FullyShardedDataParallel before forward",
                    blocks.at(0).names.at(0), operation));
  }
  void release() noexcept override {}

  const std::vector<Block> blocks;
  const int ranks;  ///< That share a copy of the model.
};

/// Returns the unit with the names and parameters of the model. `name`: in the model, of any parameter of the unit.
ShardedUnit unit_of(const std::shared_ptr<BuiltUnit>& built, const std::string& name,
                    const torch::OrderedDict<std::string, at::Tensor>& all, int ranks,
                    const FullyShardedPrecision& precision) {
  std::string prefix = name;
  for (const BuiltUnit::Block& block : built->blocks) {
    for (const std::string& own : block.names) {
      if (name == own || name.ends_with('.' + own)) prefix = name.substr(0, name.size() - own.size());
    }
  }
  ShardedUnit unit{.name = prefix.empty() ? "root" : prefix.substr(0, prefix.size() - 1), .blocks = {}};
  for (const BuiltUnit::Block& block : built->blocks) {
    at::ScalarType dtype = block.shard.scalar_type();
    if (at::isFloatingType(dtype)) dtype = precision.param_dtype.value_or(dtype);
    if (built->ranks != ranks || dtype != block.dtype)
      throw InvalidArgument(fmt::format(
          "module {} was sharded by fully_shard() over {} ranks with type {}, but FullyShardedDataParallel needs {} "
          "ranks and type {}: pass the same group and the same options to both",
          unit.name, built->ranks, c10::toString(block.dtype), ranks, c10::toString(dtype)));
    ShardedBlock own{.parameters = {}, .layout = block.layout, .dtype = block.dtype, .shard = block.shard};
    for (const std::string& relative : block.names) {
      const at::Tensor* tensor = all.find(prefix + relative);
      if (!tensor || GatheredParameter::kept_by(*tensor) != built || tensor->requires_grad() != block.requires_grad)
        throw InvalidArgument(
            fmt::format("parameter {} was replaced, or its requires_grad was changed, after fully_shard(): change the "
                        "module before",
                        prefix + relative));
      own.parameters.push_back({.name = prefix + relative, .tensor = *tensor});
    }
    unit.blocks.push_back(std::move(own));
  }
  return unit;
}

std::vector<ShardedUnit> units_of_fully_shard(const torch::nn::Module& module, int ranks,
                                              const FullyShardedPrecision& precision) {
  const auto all = module.named_parameters();
  std::vector<ShardedUnit> units;
  std::unordered_set<const void*> seen;
  for (const auto& item : all) {
    const auto built = std::dynamic_pointer_cast<BuiltUnit>(GatheredParameter::kept_by(item.value()));
    if (built && seen.insert(built.get()).second) units.push_back(unit_of(built, item.key(), all, ranks, precision));
  }
  return units;
}

}  // namespace

std::vector<ShardedUnit> agree_on_units(torch::nn::Module& module, const ProcessGroup& group,
                                        const FullyShardedOptions& options) {
  if (group.device().is_cpu()) return_freed_units();
  std::vector<ShardedUnit> units;
  check_same_on_all_ranks(group, "FullyShardedDataParallel", [&] {
    const std::size_t min_bytes = min_unit_bytes(options);
    if (options.prefetch < 0)
      throw InvalidArgument(fmt::format("prefetch is {} units, but must be 0 or more", options.prefetch));
    const int ranks = ranks_of_copy(group, options);
    check_parameters(module, group.device());
    units = units_of_fully_shard(module, ranks, options.precision);
    for (UnitPlan& plan : plan_units(module, options.units, min_bytes))
      units.push_back(make_unit(std::move(plan), options.precision, ranks));
    return fmt::format("units [{}], min_unit_mb {}, reshard_after_forward {}, prefetch {}, cast_forward_inputs {}\n",
                       fmt::join(options.units, ", "), options.min_unit_mb, options.reshard_after_forward,
                       options.prefetch, options.precision.cast_forward_inputs) +
           describe_layout(module, options);
  });
  check_same_model(group, "FullyShardedDataParallel", "the model differs between ranks", [&] {
    NamedTensors parameters;
    for (const auto& item : module.named_parameters()) parameters.emplace_back(item.key(), item.value());
    auto lines = describe_model(module, parameters, {});
    // Ranks may have equal parameters in modules of different types.
    for (const ShardedUnit& unit : units) lines.push_back("unit " + unit.name);
    return lines;
  });
  return units;
}

void fully_shard(torch::nn::Module& module, const ProcessGroup& group, const FullyShardedOptions& options) {
  if (group.device().is_cpu()) return_freed_units();
  check_same_on_all_ranks(group, "fully_shard", [&] {
    ranks_of_copy(group, options);
    for (const auto& item : module.named_parameters()) check_parameter(item.key(), item.value(), group.device());
    check_parameters(module, group.device());
    return describe_layout(module, options);
  });
  check_same_model(group, "fully_shard", "the module differs between ranks", [&] {
    NamedTensors parameters;
    for (const auto& item : module.named_parameters()) parameters.emplace_back(item.key(), item.value());
    return describe_model(module, parameters, {});
  });
  const at::NoGradGuard no_grad;
  UnitPlan plan{.name = {}, .parameters = {}};
  std::unordered_set<const void*> seen;  // Tied parameters.
  for (const auto& item : module.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      plan.parameters.push_back({.name = item.key(), .tensor = item.value()});
  }
  if (plan.parameters.empty()) return;
  const int ranks = ranks_of_copy(group, options);
  const ShardedUnit unit = make_unit(std::move(plan), options.precision, ranks);
  std::vector<BuiltUnit::Block> blocks;
  for (const ShardedBlock& block : unit.blocks) {
    const at::Tensor& first = block.parameters[0].tensor;
    const at::Tensor flat = at::zeros({block.layout.numel}, first.options().requires_grad(false));
    BuiltUnit::Block built{.names = {},
                           .layout = block.layout,
                           .dtype = *block.dtype,
                           .requires_grad = first.requires_grad(),
                           .shard = {}};
    for (std::size_t i = 0; i < block.parameters.size(); ++i) {
      built.names.push_back(block.parameters[i].name);
      if (group.rank() == 0)
        flat.narrow(0, block.layout.offsets[i], block.layout.numels[i]).copy_(in_order(block.parameters[i].tensor));
    }
    group.broadcast(flat.view(at::kByte), 0);
    built.shard = flat.narrow(0, group.rank() % ranks * block.layout.shard_numel, block.layout.shard_numel).clone();
    blocks.push_back(std::move(built));
  }
  const auto built = std::make_shared<BuiltUnit>(std::move(blocks), ranks);
  for (std::size_t b = 0; b < unit.blocks.size(); ++b) {
    for (const NamedParameter& parameter : unit.blocks[b].parameters)
      GatheredParameter(parameter.name, parameter.tensor, built->blocks[b].dtype, built->blocks[b].shard.scalar_type(),
                        built, built);
  }
}

}  // namespace ddpkit
