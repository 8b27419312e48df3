// Collectives use slots of shared memory and transfer one piece at a time.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "virtual_gpu/nccl/communicator.h"

namespace vgpu::nccl {
namespace {

constexpr const char* kNames[] = {"AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AlltoAll"};

template <class T>
T combined(T a, T b, int op) {
  switch (op) {
    case ncclProd:
      return static_cast<T>(a * b);
    case ncclMax:
      return std::max(a, b);
    case ncclMin:
      return std::min(a, b);
    default:
      return static_cast<T>(a + b);
  }
}

/// 16-bit floats are accumulated in 32 bits.
template <class T>
void reduce_as(char* out, const std::vector<const char*>& inputs, std::size_t count, int op) {
  using Sum = std::conditional_t<std::is_arithmetic_v<T>, T, float>;
  for (std::size_t i = 0; i < count; ++i) {
    const auto value = [&](std::size_t input) {
      return static_cast<Sum>(reinterpret_cast<const T*>(inputs[input])[i]);
    };
    Sum sum = value(0);
    for (std::size_t input = 1; input < inputs.size(); ++input) sum = combined(sum, value(input), op);
    if (op == ncclAvg) sum = static_cast<Sum>(sum / static_cast<Sum>(inputs.size()));
    reinterpret_cast<T*>(out)[i] = static_cast<T>(sum);
  }
}

void copy(char* to, const char* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

/// Blocks forever if VGPU_MISMATCH is "hang", as NCCL does; aborts the process otherwise.
void report_mismatch(Communicator& communicator, int peer, const Call& mine, const Call& theirs) {
  std::fprintf(stderr, "virtual NCCL: rank %d calls %s, but rank %d calls %s: a GPU would hang\n", communicator.rank(),
               mine.text().c_str(), peer, theirs.text().c_str());
  const char* mode = std::getenv("VGPU_MISMATCH");
  if (!mode || std::strcmp(mode, "hang") != 0) std::abort();
  Backoff backoff;
  while (!communicator.aborted()) backoff.pause();
}

/// The memory of one piece of a collective. AlltoAll and ReduceScatter have one part of a slot for each rank.
struct Piece {
  std::size_t begin, bytes, total, stride;
};

void put(Communicator& c, const Call& call, const Piece& piece, const char* send) {
  char* slot = c.slot(c.rank());
  if (call.kind == Kind::kAllToAll || call.kind == Kind::kReduceScatter) {
    for (int rank = 0; rank < c.ranks(); ++rank) {
      const auto part = static_cast<std::size_t>(rank);
      copy(slot + part * piece.stride, send + part * piece.total + piece.begin, piece.bytes);
    }
  } else if (call.kind != Kind::kBroadcast || c.rank() == call.root) {
    copy(slot, send + piece.begin, piece.bytes);
  }
}

void get(Communicator& c, const Call& call, const Piece& piece, char* receive) {
  const auto own_part = static_cast<std::size_t>(c.rank()) * piece.stride;
  const std::size_t count = piece.bytes / size_of(call.type);
  std::vector<const char*> inputs;
  for (int rank = 0; rank < c.ranks(); ++rank)
    inputs.push_back(c.slot(rank) + (call.kind == Kind::kAllToAll || call.kind == Kind::kReduceScatter ? own_part : 0));
  switch (call.kind) {
    case Kind::kReduce:
      if (c.rank() != call.root) return;
      [[fallthrough]];
    case Kind::kAllReduce:
    case Kind::kReduceScatter:
      return reduce(receive + piece.begin, inputs, count, call.type, call.op);
    case Kind::kBroadcast:
      return copy(receive + piece.begin, c.slot(call.root), piece.bytes);
    case Kind::kAllGather:
    case Kind::kAllToAll:
      for (std::size_t rank = 0; rank < inputs.size(); ++rank)
        copy(receive + rank * piece.total + piece.begin, inputs[rank], piece.bytes);
  }
}

}  // namespace

std::string Call::text() const {
  return "nccl" + std::string(kNames[static_cast<int>(kind)]) + " number " + std::to_string(sequence) + " of " +
         std::to_string(count) + " elements, type " + std::to_string(type) + ", operation " + std::to_string(op) +
         ", root " + std::to_string(root);
}

std::size_t size_of(int type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

void reduce(char* out, const std::vector<const char*>& inputs, std::size_t count, int type, int op) {
  switch (type) {
    case ncclInt8:
      return reduce_as<std::int8_t>(out, inputs, count, op);
    case ncclUint8:
      return reduce_as<std::uint8_t>(out, inputs, count, op);
    case ncclInt32:
      return reduce_as<std::int32_t>(out, inputs, count, op);
    case ncclUint32:
      return reduce_as<std::uint32_t>(out, inputs, count, op);
    case ncclInt64:
      return reduce_as<std::int64_t>(out, inputs, count, op);
    case ncclUint64:
      return reduce_as<std::uint64_t>(out, inputs, count, op);
    case ncclFloat16:
      return reduce_as<c10::Half>(out, inputs, count, op);
    case ncclBfloat16:
      return reduce_as<c10::BFloat16>(out, inputs, count, op);
    case ncclFloat32:
      return reduce_as<float>(out, inputs, count, op);
    case ncclFloat64:
      return reduce_as<double>(out, inputs, count, op);
    default:
      std::fprintf(stderr, "virtual NCCL: data type %d cannot be reduced\n", type);
      std::abort();
  }
}

bool Communicator::check_calls(const Call& call) {
  page(rank_).call = call;
  if (!stream_barrier()) return false;
  for (int rank = 0; rank < ranks_; ++rank)
    if (page(rank).call != call) report_mismatch(*this, rank, call, page(rank).call);
  return !aborted_;
}

void Communicator::run(Call call, const char* send, char* receive) {
  call.sequence = sequence_++;
  run_fault(kNames[static_cast<int>(call.kind)]);
  if (aborted_ || !check_calls(call)) return;  // The other ranks must not see calls after the abort.
  const bool in_parts = call.kind == Kind::kAllToAll || call.kind == Kind::kReduceScatter;
  const std::size_t stride = kSlotBytes / static_cast<std::size_t>(in_parts ? ranks_ : 1) / 64 * 64;
  const std::size_t total = call.count * size_of(call.type);
  for (std::size_t begin = 0; begin < total; begin += stride) {
    const Piece piece{begin, std::min(stride, total - begin), total, stride};
    put(*this, call, piece, send);
    if (!stream_barrier()) return;
    get(*this, call, piece, receive);
    if (!stream_barrier()) return;
  }
}

}  // namespace vgpu::nccl
