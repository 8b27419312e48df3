// Tier 0: the standard library, and c10's pointers.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>

namespace c10d {
class Store;
}  // namespace c10d

namespace ddpkit {
namespace shm {
class Engine;
}

/// A child made by fork() does not destroy the engine: the child does not have the engine's threads, and its end must
/// not be reported to the other ranks.
std::shared_ptr<shm::Engine> share(std::unique_ptr<shm::Engine> engine);

/// Maps the memory of the ranks. Collective. Errors count ranks from `first_rank`. Throws like create_shm_backend().
std::shared_ptr<shm::Engine> connect_engine(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                            std::chrono::milliseconds timeout, int first_rank);

}  // namespace ddpkit
