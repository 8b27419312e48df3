// The calls of NCCL that LibTorch makes.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "virtual_gpu/nccl/handle.h"

using vgpu::nccl::Backoff, vgpu::nccl::Communicator, vgpu::nccl::communicator_of, vgpu::nccl::Kind, vgpu::nccl::Message;

namespace {

/// Calls between ncclGroupStart() and ncclGroupEnd() of this thread.
struct Group {
  int depth = 0;
  std::vector<Message> messages;
  std::vector<std::shared_ptr<Communicator>> joining;
};
thread_local Group group;

void enqueue(const std::shared_ptr<Communicator>& communicator, void* stream, vgpu::Task task) {
  const bool captured = vgpu::is_capturing(stream);
  // With one rank, NCCL only copies: a graph with such a copy does not depend on the communicator.
  const auto work = captured && communicator->ranks() == 1 ? nullptr : Communicator::work_of(communicator, captured);
  vgpu::enqueue(stream, [work, task = std::move(task)] { task(); });
}

/// Operations of ncclRedOpCreatePreMulSum() are numbers of a communicator. All ranks see this one.
constexpr int kPreMulSum = ncclNumOps;

/// Bytes that this rank sends and receives.
std::pair<std::size_t, std::size_t> bytes_of(const Communicator& communicator, const vgpu::nccl::Call& call) {
  const std::size_t one = call.count * vgpu::nccl::size_of(call.type);
  const std::size_t all = one * static_cast<std::size_t>(communicator.ranks());
  const bool is_root = communicator.rank() == call.root;
  switch (call.kind) {
    case Kind::kAllReduce:
      return {one, one};
    case Kind::kBroadcast:
      return {is_root ? one : 0, one};
    case Kind::kReduce:
      return {one, is_root ? one : 0};
    case Kind::kAllGather:
      return {one, all};
    case Kind::kReduceScatter:
      return {all, one};
    default:
      return {all, all};
  }
}

ncclResult_t collective(ncclComm_t handle, vgpu::nccl::Call call, const void* send, void* receive, void* stream) {
  if (vgpu::devices_are_lost()) return ncclUnhandledCudaError;
  const auto communicator = communicator_of(handle);
  if (const ncclResult_t result = communicator->run_host_fault(call.name().c_str() + std::strlen("nccl")))
    return result;
  communicator_of(handle);  // Another thread may not end the communicator until this call returns.
  const auto [sent, received] = bytes_of(*communicator, call);
  std::vector<vgpu::Access> accesses = {{send, sent, false}, {receive, received, true}};
  vgpu::nccl::Factor factor;
  if (call.op >= kPreMulSum) {
    const auto& scale = communicator->scales.at(call.op);
    factor = scale.factor;
    accesses.push_back(scale.access);
    call.op = kPreMulSum;
  }
  vgpu::check_order(stream, call.name(), accesses);
  enqueue(communicator, stream, [=] {
    communicator->run(call, static_cast<const char*>(vgpu::host_address(send)),
                      static_cast<char*>(vgpu::host_address(receive)), factor);
  });
  return ncclSuccess;
}

/// Enqueues the messages of each stream as one task.
void flush_messages() {
  std::map<void*, std::vector<Message>> of_stream;
  for (Message& message : group.messages) of_stream[message.stream].push_back(std::move(message));
  group.messages.clear();
  for (auto& [stream, messages] : of_stream) {
    const auto communicator = messages.front().communicator;
    std::vector<vgpu::Access> accesses;
    for (Message& message : messages) {
      accesses.push_back({message.data, message.bytes, !message.is_send});
      message.data = static_cast<char*>(vgpu::host_address(message.data));
    }
    vgpu::check_order(stream, "ncclSend and ncclRecv", accesses);
    enqueue(communicator, stream, [messages = std::move(messages)] { vgpu::nccl::run_messages(messages); });
  }
}

ncclResult_t message(ncclComm_t handle, bool is_send, const void* data, std::size_t bytes, int peer, void* stream) {
  if (vgpu::devices_are_lost()) return ncclUnhandledCudaError;
  group.messages.push_back(
      {communicator_of(handle), stream, is_send, static_cast<char*>(const_cast<void*>(data)), bytes, peer});
  if (group.depth == 0) flush_messages();
  return ncclSuccess;
}

void wait_for_ranks(const Communicator& communicator) {
  Backoff backoff;
  while (!communicator.all_joined() && !communicator.aborted()) backoff.pause();
}

ncclResult_t join(ncclComm_t* out, const std::string& name, int ranks, int rank, const ncclConfig_t* config) {
  try {
    *out = new ncclComm{std::make_shared<Communicator>(name, ranks, rank)};
  } catch (const std::exception&) {
    return ncclSystemError;
  }
  if (config && config->blocking == 0) return ncclInProgress;
  if (group.depth > 0) {
    group.joining.push_back((*out)->communicator);
  } else {
    wait_for_ranks(*(*out)->communicator);
  }
  return ncclSuccess;
}

/// Orders the ranks of a new communicator by key, then by their old rank.
ncclResult_t split(Communicator& parent, int color, int key, ncclComm_t* out, const ncclConfig_t* config) {
  parent.page(parent.rank()).color = color;
  parent.page(parent.rank()).key = key;
  if (!parent.host_barrier()) return ncclInternalError;
  int ranks = 0, rank = 0;
  for (int other = 0; other < parent.ranks(); ++other) {
    if (parent.page(other).color != color) continue;
    ++ranks;
    const int other_key = parent.page(other).key;
    if (other_key < key || (other_key == key && other < parent.rank())) ++rank;
  }
  if (!parent.host_barrier()) return ncclInternalError;
  const std::string name = parent.name() + "-" + std::to_string(parent.next_split()) + "-" + std::to_string(color);
  *out = nullptr;
  return color == NCCL_SPLIT_NOCOLOR ? ncclSuccess : join(out, name, ranks, rank, config);
}

std::size_t bytes_of(std::size_t count, ncclDataType_t type) { return count * vgpu::nccl::size_of(type); }

}  // namespace

VGPU_API ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

VGPU_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  *id = {};
  std::snprintf(id->internal, sizeof id->internal, "/vgpu-nccl-%d-%08x%08x", ::getpid(), random(), random());
  return ncclSuccess;
}

VGPU_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int ranks, ncclUniqueId id, int rank,
                                             ncclConfig_t* config) {
  return join(out, id.internal, ranks, rank, config);
}

VGPU_API ncclResult_t ncclCommInitRank(ncclComm_t* out, int ranks, ncclUniqueId id, int rank) {
  return join(out, id.internal, ranks, rank, nullptr);
}

VGPU_API ncclResult_t ncclCommInitRankScalable(ncclComm_t* out, int ranks, int rank, int, ncclUniqueId* ids,
                                               ncclConfig_t* config) {
  return join(out, ids[0].internal, ranks, rank, config);
}

VGPU_API ncclResult_t ncclCommInitAll(ncclComm_t* out, int count, const int* devices) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  const int device = vgpu::current_device();
  ncclGroupStart();
  for (int rank = 0; rank < count; ++rank) {
    cudaSetDevice(devices ? devices[rank] : rank);
    join(&out[rank], id.internal, count, rank, nullptr);
  }
  cudaSetDevice(device);
  return ncclGroupEnd();
}

VGPU_API ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* out, ncclConfig_t* config) {
  return split(*communicator_of(parent), color, key, out, config);
}

VGPU_API ncclResult_t ncclCommShrink(ncclComm_t handle, int* excluded, int excluded_count, ncclComm_t* out,
                                     ncclConfig_t* config, int flags) {
  const auto parent = communicator_of(handle);
  const auto is_excluded = [&](int rank) { return std::count(excluded, excluded + excluded_count, rank) > 0; };
  if (is_excluded(parent->rank())) return ncclInvalidArgument;
  int ranks = 0, rank = 0;
  for (int old = 0; old < parent->ranks(); ++old) {
    if (is_excluded(old)) continue;
    if (old < parent->rank()) ++rank;
    ++ranks;
  }
  // Without the flag, the parent may not have collectives in progress.
  flags == NCCL_SHRINK_ABORT ? parent->abort() : parent->finalize();
  return join(out, parent->name() + "-shrunk-" + std::to_string(parent->next_split()), ranks, rank, config);
}

VGPU_API ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  communicator_of(handle)->finalize();
  return ncclSuccess;
}

VGPU_API ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  communicator_of(handle)->finalize();
  vgpu::nccl::end_registrations(handle);
  handle->communicator.reset();
  return ncclSuccess;
}

VGPU_API ncclResult_t ncclCommAbort(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  communicator_of(handle)->abort();
  vgpu::nccl::end_registrations(handle);
  handle->communicator.reset();
  return ncclSuccess;
}

VGPU_API ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  const auto& communicator = communicator_of(handle);
  *error = communicator->all_joined() ? communicator->error() : ncclInProgress;
  return ncclSuccess;
}

VGPU_API ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  *count = communicator_of(handle)->ranks();
  return ncclSuccess;
}

VGPU_API ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  *rank = communicator_of(handle)->rank();
  return ncclSuccess;
}

VGPU_API const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : "an error of the virtual NCCL";
}

VGPU_API const char* ncclGetLastError(ncclComm_t) { return ""; }

VGPU_API ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}

VGPU_API ncclResult_t ncclGroupEnd() {
  if (--group.depth > 0) return ncclSuccess;
  for (const auto& communicator : std::exchange(group.joining, {})) wait_for_ranks(*communicator);
  flush_messages();
  return ncclSuccess;
}

VGPU_API ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) { return ncclInvalidUsage; }

VGPU_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                               ncclScalarResidence_t residence, ncclComm_t handle) {
  auto& scales = communicator_of(handle)->scales;
  const std::size_t bytes = vgpu::nccl::size_of(type);
  const int number = scales.empty() ? kPreMulSum : scales.rbegin()->first + 1;
  auto& scale = scales[number];
  *op = static_cast<ncclRedOp_t>(number);
  if (residence == ncclScalarDevice) {  // Read when the collective runs.
    scale = {[scalar] { return vgpu::host_address(scalar); }, {scalar, bytes, false}};
  } else {
    const auto* const begin = static_cast<const char*>(scalar);
    scale = {[copy = std::vector<char>(begin, begin + bytes)] { return copy.data(); }, {nullptr, 0, false}};
  }
  return ncclSuccess;
}

VGPU_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t handle) {
  return communicator_of(handle)->scales.erase(op) == 1 ? ncclSuccess : ncclInvalidArgument;
}

VGPU_API ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                    ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, {0, Kind::kAllReduce, type, op, 0, count}, send, receive, stream);
}

VGPU_API ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                                    ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, {0, Kind::kBroadcast, type, 0, root, count}, send, receive, stream);
}

VGPU_API ncclResult_t ncclBcast(void* memory, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                                cudaStream_t stream) {
  return ncclBroadcast(memory, memory, count, type, root, comm, stream);
}

VGPU_API ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                 int root, ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, {0, Kind::kReduce, type, op, root, count}, send, receive, stream);
}

VGPU_API ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                                    cudaStream_t stream) {
  return collective(comm, {0, Kind::kAllGather, type, 0, 0, count}, send, receive, stream);
}

VGPU_API ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                                        ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, {0, Kind::kReduceScatter, type, op, 0, count}, send, receive, stream);
}

VGPU_API ncclResult_t ncclAlltoAll(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                                   cudaStream_t stream) {
  return collective(comm, {0, Kind::kAllToAll, type, 0, 0, count}, send, receive, stream);
}

VGPU_API ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                               cudaStream_t stream) {
  return message(comm, true, data, bytes_of(count, type), peer, stream);
}

VGPU_API ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                               cudaStream_t stream) {
  return message(comm, false, data, bytes_of(count, type), peer, stream);
}
