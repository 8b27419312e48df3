// Tier 1. Creation of the backends for init_process_group. If a backend is not built, it throws InvalidArgument.
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

/// A backend that can report to other ranks why this rank aborts. Found by dynamic_cast, like OwnBackend.
class AbortableBackend {
 public:
  virtual ~AbortableBackend() = default;
  virtual void abort_group(const std::string& reason) noexcept = 0;
};

/// Functions of ddpkit's shm backend for CPU tensors that c10d::Backend does not have.
class OwnBackend : public AbortableBackend {
 public:
  /// Synchronous all-reduce without c10d's Work object, which takes half of the time of a small all-reduce.
  virtual void all_reduce_now(const at::Tensor& tensor, const c10d::ReduceOp& op) = 0;
  /// Synchronous versions of _allgather_base(), _reduce_scatter_base() and barrier(); tensors of any shape.
  virtual void all_gather_now(const at::Tensor& output, const at::Tensor& input) = 0;
  virtual void reduce_scatter_now(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) = 0;
  virtual void barrier_now() = 0;
  virtual at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) = 0;
  /// Reduces dense tensors in symmetric memory in place, as one collective. Number, sizes and types of the tensors are
  /// the same on all ranks; their addresses may differ.
  virtual c10::intrusive_ptr<c10d::Work> all_reduce_in_place(const std::vector<at::Tensor>& tensors,
                                                             const c10d::ReduceOp& op) = 0;
  /// Like all_reduce_in_place(), but rank r only receives slice r (shard_of) of each sum, in `slices`: dense, one per
  /// tensor. When the work is complete, no rank reads `tensors` any more. `tensors` do not change.
  virtual c10::intrusive_ptr<c10d::Work> reduce_scatter_in_place(const std::vector<at::Tensor>& tensors,
                                                                 const std::vector<at::Tensor>& slices,
                                                                 const c10d::ReduceOp& op) = 0;
  /// Allocates this process's large CPU tensors from memory that all ranks map, from now on. Collective. Callers share
  /// one lease. Returns null on all ranks if one rank cannot open it, because its process has an arena of another group
  /// or an older arena of this group that other ranks have released.
  virtual std::shared_ptr<ArenaLease> open_arena(std::size_t capacity, std::size_t reserve) = 0;
};

/// Connects to the rendezvous store. Rank 0 serves a TCPStore at the master's address, unless the launcher does. Keys
/// contain the run and the number of earlier rendezvous of this rank at that store.
c10::intrusive_ptr<c10d::Store> connect_store(const LaunchEnvironment& environment, std::chrono::milliseconds timeout);
/// Counts a completed rendezvous: the next one at the same store uses other keys.
void note_rendezvous(const LaunchEnvironment& environment);

/// `name`: this rank's number in messages. -1: environment.rank.
c10::intrusive_ptr<c10d::Backend> create_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const LaunchEnvironment& environment,
                                                      std::chrono::milliseconds timeout, int name = -1);
c10::intrusive_ptr<c10d::Backend> create_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const LaunchEnvironment& environment, c10::Device device,
                                                      std::chrono::milliseconds timeout);

/// A backend and its name.
struct BackendKind {
  std::string_view name;
  c10::intrusive_ptr<c10d::Backend> (*create)(const c10::intrusive_ptr<c10d::Store>& store,
                                              const LaunchEnvironment& environment, c10::Device device,
                                              std::chrono::milliseconds timeout);
};
/// Returns null for an unknown name.
const BackendKind* find_backend(std::string_view name);
/// Throws InvalidArgument for an unknown name. `source`: origin of the name, for the error.
const BackendKind& backend_named(std::string_view name, const char* source);

}  // namespace ddpkit
