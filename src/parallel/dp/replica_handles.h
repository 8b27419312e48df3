// Tier 2: torch/nn/module.h. What the members of a module and of its clone refer to.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace ddpkit {

/// A module and two clones of it, as the lists of their parts, which are in one order. [part]
struct ReplicaModules {
  std::vector<std::string> names;
  std::vector<std::shared_ptr<torch::nn::Module>> original, clone, scratch;
};

/// A tensor that the module registers, and the clone's tensor of that name.
struct NamedCopy {
  std::string kind;  ///< "parameter" or "buffer".
  std::string name;
  at::Tensor source;
  at::Tensor copy;
};

/// Module::clone() lets reset() assign members. A member that was assigned elsewhere, as by
/// `head->weight = body->weight`, refers to another tensor in the clone: `head.weight`. match_handles() makes
/// `body.weight` the source of that tensor. Throws InvalidArgument with the names of the part and the tensor or module
/// if it finds no such source.
///
/// To find what a part refers to, match_handles() copies the part's members to those of `scratch`, and counts
/// references. Nothing else may hold `scratch`. Parts whose type implements clone() without torch::nn::Cloneable are
/// not compared.
void match_handles(ReplicaModules modules, std::vector<NamedCopy>& copies);

}  // namespace ddpkit
