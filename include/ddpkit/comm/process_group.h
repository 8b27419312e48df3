// Tier 1: ATen/core/Tensor.h. c10d's own headers (tier 2) are needed only by whoever calls backend().
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ddpkit/comm/environment.h>

namespace c10d {
class Backend;
class Store;
class Work;
}  // namespace c10d

namespace ddpkit {

/// How values of several ranks become one. Names and meaning are c10d's.
enum class ReduceOp { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor };

/// A collective under way. A handle: copies refer to the same collective. Its tensors must be neither
/// read nor written until wait() has returned. Letting it go out of scope neither waits nor cancels.
class Work {
 public:
  Work();                                              ///< Behind which there is no collective.
  explicit Work(c10::intrusive_ptr<c10d::Work> work);  ///< Takes c10d's own.
  ~Work();
  Work(const Work&);
  Work(Work&&) noexcept;
  Work& operator=(const Work&);
  Work& operator=(Work&&) noexcept;

  /// True when there is a collective behind this handle.
  bool valid() const noexcept { return static_cast<bool>(work_); }

  /// CPU: blocks until the result is there. CUDA: makes the current stream wait and returns.
  /// Throws what the collective failed with (CollectiveMismatch, PeerLost, Timeout).
  void wait();

  /// Whether wait() would return at once. Makes progress, never blocks.
  bool is_completed();

  /// c10d's own object, for code written against it.
  const c10::intrusive_ptr<c10d::Work>& c10d_work() const noexcept { return work_; }

 private:
  friend class ProcessGroup;
  static constexpr std::uint64_t kNoRecord = ~std::uint64_t{0};
  Work(c10::intrusive_ptr<c10d::Work> work, std::uint64_t record);

  c10::intrusive_ptr<c10d::Work> work_;
  std::uint64_t record_ = kNoRecord;  ///< The flight recorder's.
};

/// A fixed set of ranks that call collectives together. A handle: copies are the same group.
///
/// Every rank must call the same collectives with the same sizes and types in the same order. The `shm` backend
/// compares the calls and throws CollectiveMismatch on every rank where they differ. Calls of one rank on one group
/// come from one thread at a time. A child made by fork() without exec() is no rank: it may let go of the group, and
/// call nothing of it.
///
/// Tensors are dense and lie on device(). A collective throws InvalidArgument for one that does not suit it, PeerLost
/// when another rank has ended or given up, Timeout when one does not come within InitOptions::timeout. With `shm` the
/// first failure ends the group: every later call throws it again. An `_async` call is the same collective, begun: its
/// tensors belong to it until Work::wait(), which throws what it failed with.
class ProcessGroup {
 public:
  /// Wraps any c10d backend.
  ProcessGroup(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store, at::Device device,
               const LaunchEnvironment& environment = {});

  int rank() const noexcept;              ///< 0 .. world_size()-1.
  int world_size() const noexcept;        ///< Ranks in the group.
  int local_rank() const noexcept;        ///< Position on this host.
  int local_world_size() const noexcept;  ///< Ranks on this host.
  /// Where this rank's model and batches belong: its GPU, or the CPU.
  at::Device device() const noexcept;
  /// "shm", "gloo", "nccl", "hierarchical", or what a wrapped backend calls itself.
  const std::string& backend_name() const noexcept;

  /// Reduces `tensor` element by element over all ranks, in place, the same bits on every rank. Any shape; contiguous.
  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum) const;
  /// all_reduce(), begun.
  [[nodiscard]] Work all_reduce_async(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum) const;

  /// Overwrites `tensor` with rank `root`'s. Any shape; contiguous.
  void broadcast(const at::Tensor& tensor, int root = 0) const;
  /// broadcast(), begun.
  [[nodiscard]] Work broadcast_async(const at::Tensor& tensor, int root = 0) const;

  /// Every rank's `tensor`, stacked: shape [world_size, ...tensor.sizes()], row r from rank r.
  at::Tensor all_gather(const at::Tensor& tensor) const;

  /// The same into `output`: contiguous, world_size * tensor.numel() elements, rank r's from r * tensor.numel() on.
  /// `tensor` may be this rank's part of `output`.
  void all_gather_into(const at::Tensor& output, const at::Tensor& tensor) const;
  /// all_gather_into(), begun.
  [[nodiscard]] Work all_gather_into_async(const at::Tensor& output, const at::Tensor& tensor) const;

  /// The reduction over all ranks, in rank `root`'s `tensor`; the others' stay as they are.
  void reduce(const at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::kSum) const;

  /// Reduces `input` over all ranks; rank r gets the r-th part. `input` holds world_size * output.numel() elements;
  /// both contiguous. `output` may be this rank's part of `input`.
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::kSum) const;
  /// reduce_scatter(), begun.
  [[nodiscard]] Work reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                                          ReduceOp op = ReduceOp::kSum) const;

  /// Rank `root` gets every rank's `tensor`, stacked as by all_gather(); the others get an undefined tensor.
  at::Tensor gather(const at::Tensor& tensor, int root = 0) const;

  /// Rank r gets row r of rank `root`'s `input`: shape [world_size, ...output.sizes()], looked at only there.
  void scatter(const at::Tensor& output, const at::Tensor& input, int root = 0) const;

  /// Rank r gets rows of every rank's `input`, in rank order. Along dim 0; `input_splits[r]` rows go to rank r,
  /// `output_splits[r]` come from it; empty splits divide evenly.
  void all_to_all(const at::Tensor& output, const at::Tensor& input, std::vector<std::int64_t> output_splits = {},
                  std::vector<std::int64_t> input_splits = {}) const;

  /// A message to rank `destination`, which receives as many elements of the same type. Those with one tag arrive in
  /// the order they were sent; tag >= 0. With `shm` a send is over when its bytes are on their way, and arrives even
  /// when nobody waits for it.
  void send(const at::Tensor& tensor, int destination, int tag = 0) const;
  /// send(), begun.
  [[nodiscard]] Work send_async(const at::Tensor& tensor, int destination, int tag = 0) const;
  /// Overwrites `tensor` with rank `source`'s next message of that tag.
  void recv(const at::Tensor& tensor, int source, int tag = 0) const;
  /// recv(), begun.
  [[nodiscard]] Work recv_async(const at::Tensor& tensor, int source, int tag = 0) const;
  /// From whichever rank sends first; returns its number.
  int recv_any(const at::Tensor& tensor, int tag = 0) const;

  /// A group of the ranks in `ranks` (numbers in this group), renumbered in that order; empty on the others. Collective
  /// over this whole group; every rank passes the same `ranks`. The groups' collectives are independent of each other.
  std::optional<ProcessGroup> split(const std::vector<int>& ranks) const;

  /// Every rank's bytes, of any length. [rank]
  std::vector<std::string> all_gather_bytes(std::string_view bytes) const;

  /// Returns when every rank has called it.
  void barrier() const;

  /// Memory for collectives: with `shm`, pages that every rank of the host maps, so that a collective on it copies
  /// nothing; with `nccl`, memory that is registered with NCCL, or plain memory where NCCL or the GPU has no support
  /// for it; with other backends, plain memory on device(). Collective: every rank calls it, with the same arguments.
  /// Contents undefined. The tensor outlives the group.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) const;

  /// Tells the other ranks that this one cannot continue: their collectives throw PeerLost with `reason` now rather
  /// than at their timeout. Never throws. Without effect on a backend that is not ddpkit's.
  void abort(const std::string& reason) const noexcept;

  /// Throws what the group has failed with; no communication. With `nccl`, wait() does not wait for the device, and a
  /// collective that fails later leaves garbage: call check() after the host has read a result, before it is used.
  void check() const;

  /// The c10d backend, for what has no wrapper here.
  const c10::intrusive_ptr<c10d::Backend>& backend() const noexcept;
  /// The store the ranks met in; of a world of one it is a store of its own.
  const c10::intrusive_ptr<c10d::Store>& store() const noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// Options of init_process_group. What is left empty is chosen.
struct InitOptions {
  /// "shm", "gloo", "nccl", or for CPU ranks on several hosts, equally many on each, "hierarchical": shm within each
  /// host and gloo between them. Empty: DDPKIT_BACKEND, else nccl for GPUs, shm where all ranks are on this host, gloo
  /// elsewhere.
  std::string backend = {};
  /// Where the model goes. Empty: with `nccl` GPU number local_rank, else the CPU. With `shm` a GPU may be named, also
  /// the same one on several ranks: collectives of its tensors then go through the host's memory. They are queued like
  /// kernels, so that what one of them fails with comes out of a later wait() or collective; messages are refused.
  std::optional<at::Device> device = std::nullopt;
  /// How long a collective or the rendezvous waits for another rank.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Rank, world size, master. Empty: from the environment.
  std::optional<LaunchEnvironment> environment = std::nullopt;
};

/// Joins the job that the launcher describes in the environment (see read_launch_environment) and returns the group
/// of all its ranks; a world of one when there is no launcher. Blocks until every rank has come. May be called again,
/// on all ranks in the same order, also while earlier groups live: rank 0 serves the store until its process ends.
/// Throws InvalidArgument for a bad environment or backend name, RendezvousError when the ranks cannot meet.
ProcessGroup init_process_group(const InitOptions& options = {});

/// True in a build with CUDA (-DDDPKIT_CUDA=ON), also on a host without a GPU.
bool is_nccl_available() noexcept;

}  // namespace ddpkit
