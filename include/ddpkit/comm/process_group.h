// Tier 1: ATen/core/Tensor.h. Only callers of backend() need c10d's headers (tier 2).
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

/// Reduction operators. Names and meaning are those of c10d.
enum class ReduceOp {
  kSum,      ///< Sum.
  kAvg,      ///< Sum, divided by the number of ranks.
  kProduct,  ///< Product.
  kMin,      ///< Minimum.
  kMax,      ///< Maximum.
  kBand,     ///< Bitwise and.
  kBor,      ///< Bitwise or.
  kBxor,     ///< Bitwise exclusive or.
};

/// Handle of an asynchronous collective. Copies refer to the same collective. Do not read or write the collective's
/// tensors before wait() has returned. Destruction neither waits nor cancels.
class Work {
 public:
  Work();                                              ///< Empty handle: valid() is false.
  explicit Work(c10::intrusive_ptr<c10d::Work> work);  ///< Wraps a c10d::Work.
  ~Work();
  Work(const Work&);
  Work(Work&&) noexcept;
  Work& operator=(const Work&);
  Work& operator=(Work&&) noexcept;

  /// Returns true if the handle refers to a collective.
  bool valid() const noexcept { return static_cast<bool>(work_); }

  /// CPU: blocks until the result is available. CUDA: makes the current stream wait, and returns. The shm backend for
  /// CUDA first blocks until the host's part of the collective has ended.
  /// Throws the error of the collective (CollectiveMismatch, PeerLost, Timeout).
  void wait();

  /// Returns whether wait() would return immediately. Makes progress, never blocks.
  bool is_completed();

  /// Returns c10d's object, for code written for c10d.
  const c10::intrusive_ptr<c10d::Work>& c10d_work() const noexcept { return work_; }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

/// How a group changed after ranks were lost or have joined.
struct Regroup {
  std::uint64_t generation = 0;  ///< Number of changes of the group.
  std::vector<int> lost;         ///< Former numbers of the lost ranks.
  std::vector<int> old_rank_of;  ///< Former numbers of the ranks; -1: a new rank. [rank]
};

/// A set of ranks that call collectives together. Only shrink() and optim::Elastic change it. Copies refer to the same
/// group.
///
/// Every rank must call the same collectives with the same sizes and types in the same order. The `shm` backend
/// compares the calls. If they differ, it throws CollectiveMismatch on every rank. Each rank calls the collectives of
/// one group from one thread at a time. After fork() without exec(), the child process may destroy the group, and must
/// not call any other function of the group.
///
/// Tensors are dense and on device(). A collective throws
/// - InvalidArgument for an unsuitable tensor,
/// - PeerLost if another rank has ended or called abort(),
/// - Timeout if another rank does not call the collective within InitOptions::timeout.
/// With `shm` the first failure ends the group: every later call throws the same error.
///
/// The last handle ends the group. With `nccl` it waits up to 2 s for this rank's collectives and for the other ranks,
/// and std::exit() does the same. shutdown() ends the group earlier, and returns whether all ranks came.
///
/// The `_async` functions start the collective and return. Work::wait() waits for the result and throws the errors.
class ProcessGroup {
 public:
  /// Wraps a c10d backend.
  ProcessGroup(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store, at::Device device,
               const LaunchEnvironment& environment = {});

  int rank() const noexcept;              ///< 0 .. world_size()-1.
  int world_size() const noexcept;        ///< Ranks in the group.
  int local_rank() const noexcept;        ///< Position on this host.
  int local_world_size() const noexcept;  ///< Ranks on this host.
  /// Returns the device for this rank's model and batches: its GPU, or the CPU.
  at::Device device() const noexcept;
  /// Returns "shm", "gloo", "nccl", "hierarchical", or the name that a wrapped backend reports.
  const std::string& backend_name() const noexcept;

  /// Reduces `tensor` elementwise over all ranks, in place. Any shape; contiguous. All ranks get the same bits.
  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum) const;
  /// Starts all_reduce().
  [[nodiscard]] Work all_reduce_async(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum) const;

  /// Overwrites `tensor` with the tensor of rank `root`. Any shape; contiguous.
  void broadcast(const at::Tensor& tensor, int root = 0) const;
  /// Starts broadcast().
  [[nodiscard]] Work broadcast_async(const at::Tensor& tensor, int root = 0) const;

  /// Returns the tensors of all ranks, stacked: shape [world_size, ...tensor.sizes()]. Row r comes from rank r.
  at::Tensor all_gather(const at::Tensor& tensor) const;

  /// Writes the tensors of all ranks to `output`: contiguous, world_size * tensor.numel() elements. The elements of
  /// rank r start at r * tensor.numel(). `tensor` may be this rank's part of `output`.
  void all_gather_into(const at::Tensor& output, const at::Tensor& tensor) const;
  /// Starts all_gather_into().
  [[nodiscard]] Work all_gather_into_async(const at::Tensor& output, const at::Tensor& tensor) const;

  /// Reduces over all ranks into the `tensor` of rank `root`. The tensors of the other ranks do not change.
  void reduce(const at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::kSum) const;

  /// Reduces `input` over all ranks. Rank r receives part r in `output`. `input` has world_size * output.numel()
  /// elements. Both are contiguous. `output` may be this rank's part of `input`.
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::kSum) const;
  /// Starts reduce_scatter().
  [[nodiscard]] Work reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                                          ReduceOp op = ReduceOp::kSum) const;

  /// Returns the tensors of all ranks, stacked as by all_gather(), on rank `root`; an undefined tensor on the others.
  at::Tensor gather(const at::Tensor& tensor, int root = 0) const;

  /// Sends row r of rank `root`'s `input`, shape [world_size, ...output.sizes()], to rank r. Other ranks ignore
  /// `input`.
  void scatter(const at::Tensor& output, const at::Tensor& input, int root = 0) const;

  /// Exchanges rows (dim 0) between all ranks. `input_splits[r]` rows go to rank r, `output_splits[r]` rows come from
  /// rank r. `output` is in rank order. Empty splits divide evenly.
  void all_to_all(const at::Tensor& output, const at::Tensor& input, std::vector<std::int64_t> output_splits = {},
                  std::vector<std::int64_t> input_splits = {}) const;

  /// Sends `tensor` to rank `destination`, which must receive a tensor of the same size and type. Messages with the
  /// same tag arrive in the order of the sends; tag >= 0. With `shm`, send() completes when the bytes are in flight.
  /// The message arrives even if the sender does not wait for it.
  void send(const at::Tensor& tensor, int destination, int tag = 0) const;
  /// Starts send().
  [[nodiscard]] Work send_async(const at::Tensor& tensor, int destination, int tag = 0) const;
  /// Overwrites `tensor` with the next message from rank `source` that has this tag.
  void recv(const at::Tensor& tensor, int source, int tag = 0) const;
  /// Starts recv().
  [[nodiscard]] Work recv_async(const at::Tensor& tensor, int source, int tag = 0) const;
  /// Receives from the rank that sends first. Returns that rank.
  int recv_any(const at::Tensor& tensor, int tag = 0) const;

  /// Creates a group of the ranks in `ranks` (rank numbers of this group), renumbered in that order. Returns an empty
  /// optional on ranks that are not in `ranks`. Collective over this group; every rank passes the same `ranks`. The
  /// collectives of the two groups are independent.
  std::optional<ProcessGroup> split(const std::vector<int>& ranks) const;

  /// Returns the bytes of every rank, of any length. Collective. [rank]
  std::vector<std::string> all_gather_bytes(std::string_view bytes) const;

  /// Blocks until every rank has called barrier().
  void barrier() const;

  /// Allocates memory for collectives.
  /// - `shm`: pages that every rank of the host maps, so collectives do not copy.
  /// - `nccl`: memory registered with NCCL, or plain memory if NCCL or the GPU does not support registration.
  /// - Other backends: plain memory on device().
  /// Collective: every rank calls it with the same arguments. The content is undefined. The tensor may outlive the
  /// group.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) const;

  /// Reports to the other ranks that this rank cannot continue. Their collectives, also in groups of split(), throw
  /// PeerLost with `reason` at once. Never throws. A wrapped backend of c10d only ends its own collectives, if it can.
  void abort(const std::string& reason) const noexcept;

  /// After PeerLost: continues with the ranks that remain, renumbered in their order. Then rank(), world_size() and all
  /// copies of this handle refer to the new group. Collective of the ranks that remain; needs InitOptions::elastic. If
  /// another rank ends meanwhile, the group continues without that rank, too. Handles of earlier collectives, and
  /// tensors of allocate(), belong to the old group.
  /// Throws PeerLost if fewer than `min_ranks` remain, Timeout if a rank does not call shrink(), and InvalidArgument if
  /// the group has not lost a rank. With `gloo` and `nccl`, the ranks connect again. If another rank ends within its
  /// connections, that takes up to 10 s with `gloo`, and 30 s with `nccl`.
  Regroup shrink(int min_ranks = 1) const;
  /// Returns how often the group has changed.
  std::uint64_t generation() const noexcept;
  /// Returns true on a new rank that replaces a lost one, until optim::Elastic has joined the others. Before, the group
  /// has one rank. Such a rank should print nothing and write no files.
  bool is_joining() const noexcept;

  /// Throws the group's error, if there is one. No communication. With `nccl`, wait() does not wait for the device, and
  /// a collective that fails later leaves garbage. Call check() after the host has read a result, before using the
  /// result. In a group with InitOptions::elastic, it throws nothing: the next collective throws the error.
  void check() const;

  /// Ends the group in order. Collective: every rank calls it, after its last collective. Waits up to `limit` until the
  /// collectives of this rank have ended and all ranks have called shutdown(). Then returns true, and every later call
  /// of the group throws Error. A GraphedStep with collectives of the group releases its graph.
  ///
  /// Returns false if the limit passes, or if the group has failed. Then the group is aborted, as by abort(): every
  /// later call of every rank throws the reason. A second call returns the same value. Throws InvalidArgument if
  /// `limit` is not positive. Groups of split() are shut down separately, before the group that they are part of.
  bool shutdown(std::chrono::milliseconds limit = std::chrono::seconds(10)) const;

  /// Returns the c10d backend, for functions that have no wrapper here. Use it only while a ProcessGroup of this group
  /// exists.
  const c10::intrusive_ptr<c10d::Backend>& backend() const noexcept;
  /// Returns the rendezvous store. A group of one rank has a private store.
  const c10::intrusive_ptr<c10d::Store>& store() const noexcept;

 private:
  friend class Backend;
  friend class Joining;
  struct State;
  std::shared_ptr<State> state_;
};

/// Options of init_process_group. Empty fields are chosen automatically.
struct InitOptions {
  /// "shm", "gloo", "nccl" or "hierarchical". "hierarchical" is for CPU ranks on several hosts with equally many ranks
  /// per host: shm within each host, gloo between the hosts. Empty: the value of DDPKIT_BACKEND, otherwise nccl for
  /// GPUs, shm if all ranks are on this host, gloo otherwise.
  std::string backend = {};
  /// Device of the model. Empty: with `nccl`, GPU number local_rank; otherwise the CPU. `shm` accepts a GPU too, and
  /// several ranks may use the same GPU. Collectives of CUDA tensors are then copied through host memory and queued
  /// like kernels: a later wait() or collective throws their errors. send() and recv() throw InvalidArgument.
  std::optional<at::Device> device = std::nullopt;
  /// Maximum time that a collective or the rendezvous waits for another rank.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// After the loss of a rank, the others can continue with ProcessGroup::shrink(). They complete the same collectives,
  /// and throw PeerLost when each of them has called the next one. Only with `shm` or `gloo` on the CPU, or `nccl`, on
  /// one host, and without split(). With `gloo` and `nccl`, a collective then completes on no rank before all ranks
  /// have called it and wait for it, and wait() blocks until the device has completed it. CUDA graphs cannot contain
  /// collectives of the group. The value must be the same on all ranks.
  bool elastic = false;
  /// Rank, world size and master address. Empty: read from the environment.
  std::optional<LaunchEnvironment> environment = std::nullopt;
};

/// Joins the job described by the launcher's environment variables (see read_launch_environment). Returns the group of
/// all ranks; without a launcher, a group of one rank. Blocks until every rank has called it. May be called several
/// times, in the same order on all ranks, also while earlier groups exist. Rank 0 serves the store until its process
/// ends.
/// Throws InvalidArgument for a bad environment or backend name, RendezvousError if the ranks cannot connect.
ProcessGroup init_process_group(const InitOptions& options = {});

/// Returns true if ddpkit was built with CUDA (-DDDPKIT_CUDA=ON), also on a host without a GPU.
bool is_nccl_available() noexcept;

}  // namespace ddpkit
