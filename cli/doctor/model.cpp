#include "model.h"

#include <fmt/format.h>

#include "host.h"

namespace ddpkit::cli {
namespace {

/// Returns the number of float32 state values that an optimizer keeps per parameter.
double state_of(const std::string& optimizer) {
  if (optimizer == "sgd") return 0;
  return optimizer == "momentum" ? 1 : 2;
}

}  // namespace

std::vector<MemoryItem> memory_items(const ModelPlan& plan, bool on_gpu) {
  constexpr double kMiB = 1 << 20;
  const bool is_fsdp = plan.fsdp_unit > 0;
  const double n = plan.parameters, share = plan.sharded || is_fsdp ? 1.0 / plan.ranks : 1;
  std::vector<MemoryItem> items = {
      {"weights", 4 * n * (is_fsdp || (plan.sharded && !on_gpu) ? share : 1)},
      {"gradients", 4 * n * (is_fsdp ? share : 1)},
  };
  if (is_fsdp) {  // docs/fsdp.md, with a root of the size of the unit.
    // On a GPU, gathers and reductions run beside the computation.
    items.push_back({"whole weights of units and root", 4 * n * (on_gpu ? 3 : 2) * plan.fsdp_unit});
    items.push_back({"gradients in progress", 4 * n * (on_gpu ? 5 : 3) * plan.fsdp_unit});
  }
  if (state_of(plan.optimizer) > 0)
    items.push_back({fmt::format("{} state", plan.optimizer), 4 * n * state_of(plan.optimizer) * share});
  if (plan.amp) items.push_back({"16-bit copies of the weights", 2 * n});
  if (!on_gpu && !is_fsdp) items.push_back({"arena beyond the gradients", 2 * n});
  if (plan.activation_mb_per_sample > 0)
    items.push_back({fmt::format("activations of {} samples", plan.batch),
                     plan.activation_mb_per_sample * kMiB * static_cast<double>(plan.batch) * (plan.amp ? .5 : 1)});
  items.push_back(on_gpu ? MemoryItem{"CUDA context and NCCL's buffers", 1000 * kMiB}
                         : MemoryItem{"LibTorch itself", 150 * kMiB});
  return items;
}

Findings examine_model(const ModelPlan& plan, const std::string& where, double free_bytes, bool on_gpu) {
  Findings findings;
  double total = 0;
  for (const MemoryItem& item : memory_items(plan, on_gpu)) {
    findings.push_back({"model", Severity::kFine, fmt::format("{:<32} {:>12}", item.name, in_units(item.bytes))});
    total += item.bytes;
  }
  // CPU ranks share the host memory.
  const double needed = on_gpu ? total : total * plan.ranks;
  const std::string sum =
      on_gpu ? fmt::format("{} on each GPU", in_units(total))
             : fmt::format("{} on each of {} ranks, {} in all", in_units(total), plan.ranks, in_units(needed));
  const std::string unknown =
      plan.activation_mb_per_sample > 0 ? "" : " (without activations: give --activation-mb for these)";
  const bool fits = needed <= free_bytes;
  std::string advice;
  if (!fits) {
    advice = fmt::format("The model is {} too large for {}: ", in_units(needed - free_bytes), where);
    if (!plan.sharded && plan.fsdp_unit == 0 && state_of(plan.optimizer) > 0 && plan.ranks > 1)
      advice += "shard the state (ShardedOptimizer), ";
    if (plan.fsdp_unit == 0 && plan.ranks > 1)
      advice += "shard weights, gradients and state (FullyShardedDataParallel, --fsdp-unit), ";
    if (!plan.amp && plan.activation_mb_per_sample > 0) advice += "use mixed precision, ";
    if (plan.activation_mb_per_sample > 0 && plan.batch > 1) advice += "halve the batch and accumulate gradients, ";
    advice += on_gpu ? "or take a larger GPU." : "or start fewer ranks.";
  }
  findings.push_back({"model", fits ? Severity::kFine : Severity::kProblem,
                      fmt::format("{}{}: {} {} free there", sum, unknown,
                                  fits ? "fits into the" : "does not fit into the", in_units(free_bytes)),
                      advice});
  return findings;
}

}  // namespace ddpkit::cli
