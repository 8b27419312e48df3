// Groups of each backend among the ranks of one host.
#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <ddpkit/comm/process_group.h>

#include "comm/backend.h"

namespace ddpkit::testing {

/// Returns a group of the ranks of `group`. "hierarchical" has two ranks per simulated host.
inline ProcessGroup group_of(const std::string& backend, const ProcessGroup& group, std::chrono::milliseconds timeout) {
  static int number = 0;
  const auto store = c10::make_intrusive<c10d::PrefixStore>("group-" + std::to_string(number++), group.store());
  LaunchEnvironment environment;
  environment.rank = group.rank();
  environment.world_size = group.world_size();
  environment.local_world_size = backend == "hierarchical" ? 2 : group.world_size();
  environment.local_rank = group.rank() % environment.local_world_size;
  return {create_backend(backend, store, environment, at::kCPU, timeout), store, at::kCPU, environment};
}

}  // namespace ddpkit::testing
