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

/// Makes the backend for CPU ranks of one host: collectives through memory that all of them map (memfd; nothing is
/// left behind however a rank ends). Serves under a plain c10d::ProcessGroup too.
///
/// Collective: each of `world_size` ranks calls it, with a store they share and its own `rank`. `timeout` bounds the
/// meeting here and every collective that brings no timeout of its own.
/// Throws RendezvousError when ranks are on different hosts, or one does not come in time.
c10::intrusive_ptr<c10d::Backend> create_shm_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                     int world_size, std::chrono::milliseconds timeout);

}  // namespace ddpkit
