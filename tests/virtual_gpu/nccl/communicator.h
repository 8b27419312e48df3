// A communicator of libnccl.so.2: ranks exchange data in shared memory, within one process or between processes.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "virtual_gpu/vgpu.h"

namespace vgpu::nccl {

enum class Kind : int { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kAllToAll };

/// A collective call, which must be equal on all ranks.
struct Call {
  std::uint64_t sequence;
  Kind kind;
  int type, op, root;
  std::uint64_t count;

  bool operator==(const Call&) const = default;
  std::string name() const;
  std::string text() const;
};

std::size_t size_of(int type);

/// Returns the address of the factor of ncclRedOpCreatePreMulSum() when the collective runs. Empty: no factor.
using Factor = std::function<const void*()>;

constexpr int kMaxRanks = 32;
constexpr std::size_t kSlotBytes = 1 << 20, kMailBytes = 1 << 16;

struct alignas(64) RankPage {
  std::atomic<std::uint64_t> arrived_stream, arrived_host;
  Call call;
  int color, key;  ///< Arguments of ncclCommSplit().
};

/// One message from one rank to another.
struct alignas(64) Mail {
  std::atomic<std::uint32_t> bytes;
  char data[kMailBytes];
};

/// Shared memory is initialized with zeros.
struct Segment {
  std::atomic<int> joined;
  RankPage ranks[kMaxRanks];
};

class Communicator {
 public:
  /// Throws std::runtime_error if there is no shared memory.
  Communicator(const std::string& name, int ranks, int rank);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  int device() const { return device_; }
  const std::string& name() const { return name_; }
  bool all_joined() const { return segment_->joined >= ranks_; }
  RankPage& page(int rank) { return segment_->ranks[rank]; }
  char* slot(int rank) { return slots_ + static_cast<std::size_t>(rank) * kSlotBytes; }
  Mail& mail(int from, int to) { return mails_[from * ranks_ + to]; }

  /// Blocks until all ranks have called the barrier. Returns false if this rank has aborted.
  bool stream_barrier() { return barrier(&RankPage::arrived_stream, stream_generation_); }
  bool host_barrier() { return barrier(&RankPage::arrived_host, host_generation_); }

  /// Runs a collective. Calls must be in the order of a stream. The addresses are those of the host.
  void run(Call call, const char* send, char* receive, const Factor& factor);

  /// The holder of the result has work of this communicator: a queued task, or a graph.
  static std::shared_ptr<void> work_of(const std::shared_ptr<Communicator>& communicator, bool captured);
  /// Blocks until all queued work is done and all graphs with captured work are destroyed.
  void finalize();
  /// Ends this rank's collectives. The other ranks wait forever, as in NCCL. Blocks until the graphs are destroyed.
  void abort();
  bool aborted() const { return aborted_; }
  /// The result of ncclCommGetAsyncError().
  ncclResult_t error() const { return error_; }
  int next_split() { return ++splits_; }

  struct Scale {
    Factor factor;
    Access access;
  };
  /// Operations of ncclRedOpCreatePreMulSum(). Only the thread that calls collectives uses them.
  std::map<int, Scale> scales;

  /// Executes the fault that VGPU_FAULT specifies for this call on the host.
  ncclResult_t run_host_fault(const char* call);

 private:
  bool barrier(std::atomic<std::uint64_t> RankPage::*arrived, std::uint64_t& generation);
  bool check_calls(const Call& call);
  /// Executes the fault that VGPU_FAULT specifies for this call on its stream.
  void run_fault(const char* call);
  /// The creation of a communicator, for VGPU_FAULT.
  static constexpr std::string_view kInit = "CommInitRank";

  const int rank_, ranks_, device_;
  const std::string name_;
  std::size_t size_ = 0;
  Segment* segment_ = nullptr;
  char* slots_ = nullptr;
  Mail* mails_ = nullptr;
  std::uint64_t stream_generation_ = 0, sequence_ = 0;  ///< Used by the stream's thread.
  std::uint64_t host_generation_ = 0;
  int splits_ = 0, calls_of_fault_ = 0;
  std::atomic<ncclResult_t> error_ = ncclSuccess;
  std::atomic<bool> aborted_ = false;
  std::atomic<int> queued_ = 0, captured_ = 0;
};

/// Initially yields the core, then sleeps: a hung collective must not take a core from the others.
class Backoff {
 public:
  void pause();

 private:
  int pauses_ = 0;
};

/// Writes `op` over `inputs` to `out`.
void reduce(char* out, const std::vector<const char*>& inputs, std::size_t count, int type, int op);

struct Message {
  std::shared_ptr<Communicator> communicator;
  void* stream;
  bool is_send;
  char* data;
  std::size_t bytes;
  int peer;
  std::size_t done = 0;
};

/// Runs the sends and receives of one group of calls, in the order of a stream.
void run_messages(std::vector<Message> messages);

}  // namespace vgpu::nccl
