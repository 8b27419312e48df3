// Tier 2: torch/nn/module.h. References of the members of a module and of its clone.
#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ddpkit {

/// A module and two clones, each as the list of its parts, in the same order. [part]
struct ReplicaModules {
  std::vector<std::string> names;
  std::vector<std::shared_ptr<torch::nn::Module>> original, clone, scratch;
};

/// A parameter or buffer of the module, and the replicas' tensors with its name.
struct ReplicaRow {
  std::string kind;  ///< "parameter" or "buffer".
  std::string name;
  at::Tensor source;
  std::vector<at::Tensor> copies = {};  ///< [replica]
  std::size_t first = 0;                ///< The first row of this source.
  std::uint32_t version = 0;            ///< Version of `source` at the last copy.

  bool is_buffer() const { return kind == "buffer"; }
};

/// Module::clone() lets reset() assign members. A member that was assigned outside reset(), as by `head->weight =
/// body->weight`, refers to another tensor in the clone: `head.weight`. match_handles() makes `body.weight` the source
/// of this tensor. Throws InvalidArgument with the names of the part and the tensor or module if it finds no source.
///
/// `clone` is replica 0. To find the references of a part, match_handles() copies the part's members to those of
/// `scratch`, and counts references. Nothing else may hold `scratch`. Parts whose type implements clone() without
/// torch::nn::Cloneable are not compared.
void match_handles(ReplicaModules modules, std::vector<ReplicaRow>& rows);

}  // namespace ddpkit
