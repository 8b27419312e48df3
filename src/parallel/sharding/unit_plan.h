// Tier 2: torch/nn/module.h. Assigns the parameters of a module to units, which are gathered together.
#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <string>
#include <vector>

#include <ddpkit/parallel/bucket_plan.h>

namespace ddpkit {

/// A module, or small neighbours, or the rest of the model.
struct UnitPlan {
  std::string name;  ///< "blocks.0", "blocks.0 to blocks.2", or "root".
  std::vector<NamedParameter> parameters;
  bool is_root = false;
};

/// Pure function: returns the same on every rank. `patterns`: names of modules, in which the part `*` matches any
/// name, as "blocks.*". Empty: the children of the outermost ModuleList, ModuleDict and Sequential. A parameter belongs
/// to the innermost unit, and a tied parameter to the first unit that has it. Parameters in no unit are the root's,
/// which is the last unit. Parameters that are sharded already are in no unit. A unit of fewer than `min_bytes` bytes
/// is merged with the next one. Throws InvalidArgument for a pattern that no module matches.
std::vector<UnitPlan> plan_units(const torch::nn::Module& module, const std::vector<std::string>& patterns,
                                 std::size_t min_bytes);

}  // namespace ddpkit
