// Tier 0: the standard library, and c10's pointers.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <vector>

namespace c10d {
class Store;
}  // namespace c10d

namespace ddpkit {
namespace shm {
class Engine;
}

/// Maps the memory of the ranks. Collective. Errors count ranks from `first_rank`, or have the numbers in `names`.
/// Throws like create_shm_backend().
std::shared_ptr<shm::Engine> connect_engine(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                            std::chrono::milliseconds timeout, int first_rank,
                                            std::vector<int> names = {});

}  // namespace ddpkit
