// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace ddpkit {

/// Creates the `shm` backend for CPU ranks on one host. Collectives use shared memory (memfd), which the kernel frees
/// however a rank ends. Also works in a plain c10d::ProcessGroup.
///
/// Collective: each of `world_size` ranks calls it, with a shared store and its `rank`. A store serves one group: pass
/// c10d::PrefixStores with different prefixes for several. `timeout` limits the rendezvous and every collective that
/// has no separate timeout.
/// Throws RendezvousError if ranks are on different hosts, or if a rank does not connect in time, and InvalidArgument
/// if this rank has already joined a group through `store`.
c10::intrusive_ptr<c10d::Backend> create_shm_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                     int world_size, std::chrono::milliseconds timeout);

}  // namespace ddpkit
