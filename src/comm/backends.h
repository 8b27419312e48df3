// Tier 1. How init_process_group makes each backend; an absent one throws InvalidArgument that says how to get it.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include <ddpkit/comm/environment.h>

namespace c10d {
class Backend;
struct ReduceOp;
class Store;
class Work;
}  // namespace c10d

namespace ddpkit {

class ArenaLease;

/// A backend that can tell other ranks why this one gives up. Found by dynamic_cast, as the next.
class AbortableBackend {
 public:
  virtual ~AbortableBackend() = default;
  virtual void abort_group(const std::string& reason) noexcept = 0;
};

/// What ddpkit's own backend for the host's tensors can do beyond c10d::Backend.
class OwnBackend : public AbortableBackend {
 public:
  /// All-reduce to the end, without the objects that c10d needs to wait for it later: half the time of a small one.
  virtual void all_reduce_now(const at::Tensor& tensor, const c10d::ReduceOp& op) = 0;
  /// The same of _allgather_base(), _reduce_scatter_base() and barrier(); tensors of any shape.
  virtual void all_gather_now(const at::Tensor& output, const at::Tensor& input) = 0;
  virtual void reduce_scatter_now(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) = 0;
  virtual void barrier_now() = 0;
  virtual at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) = 0;
  /// Reduces dense tensors in symmetric memory where they stand, as one collective. Their number, sizes and types are
  /// the same on all ranks; where they lie may differ.
  virtual c10::intrusive_ptr<c10d::Work> all_reduce_in_place(const std::vector<at::Tensor>& tensors,
                                                             const c10d::ReduceOp& op) = 0;
  /// The same, but rank r gets only the r-th slice (shard_of) of each sum, in `slices`: dense, one for each tensor.
  /// When the work is done, no rank reads `tensors` any more; their contents are as they were.
  virtual c10::intrusive_ptr<c10d::Work> reduce_scatter_in_place(const std::vector<at::Tensor>& tensors,
                                                                 const std::vector<at::Tensor>& slices,
                                                                 const c10d::ReduceOp& op) = 0;
  /// Collective: from now on this process's large CPU tensors come from memory that all ranks map. Shared with who has
  /// asked before. Null on all ranks when one of them cannot: its process has an arena of another group, or an older
  /// one of this group that others have let go of.
  virtual std::shared_ptr<ArenaLease> open_arena(std::size_t capacity, std::size_t reserve) = 0;
};

/// Meets the other ranks: rank 0 serves a TCPStore at the master's address unless the launcher does. Keys carry the
/// run, and how often this rank has met the others there before.
c10::intrusive_ptr<c10d::Store> connect_store(const LaunchEnvironment& environment, std::chrono::milliseconds timeout);
/// The ranks have met by that store: their next rendezvous there has keys of its own.
void note_rendezvous(const LaunchEnvironment& environment);

/// `name`: this rank's number in messages; -1: environment.rank.
c10::intrusive_ptr<c10d::Backend> create_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const LaunchEnvironment& environment,
                                                      std::chrono::milliseconds timeout, int name = -1);
c10::intrusive_ptr<c10d::Backend> create_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const LaunchEnvironment& environment, c10::Device device,
                                                      std::chrono::milliseconds timeout);

/// One of the backends that a name stands for.
struct BackendKind {
  std::string_view name;
  c10::intrusive_ptr<c10d::Backend> (*create)(const c10::intrusive_ptr<c10d::Store>& store,
                                              const LaunchEnvironment& environment, c10::Device device,
                                              std::chrono::milliseconds timeout);
};
/// Null for a name that is no backend's.
const BackendKind* find_backend(std::string_view name);
/// `source` is where the name comes from, for the message of the InvalidArgument.
const BackendKind& backend_named(std::string_view name, const char* source);

}  // namespace ddpkit
