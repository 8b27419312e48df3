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

bool in_parts(Kind kind) { return kind == Kind::kAllToAll || kind == Kind::kReduceScatter; }

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

/// Multiplies all values by one value of their type.
template <class T>
void scale_as(char* values, std::size_t count, const char* factor) {
  using Product = std::conditional_t<std::is_arithmetic_v<T>, T, float>;
  auto* const elements = reinterpret_cast<T*>(values);
  const auto by = static_cast<Product>(*reinterpret_cast<const T*>(factor));
  for (std::size_t i = 0; i < count; ++i) elements[i] = static_cast<T>(static_cast<Product>(elements[i]) * by);
}

/// Calls `function` with a value of the type.
template <class Function>
void for_type(int type, const Function& function) {
  switch (type) {
    case ncclInt8:
      return function(std::int8_t());
    case ncclUint8:
      return function(std::uint8_t());
    case ncclInt32:
      return function(std::int32_t());
    case ncclUint32:
      return function(std::uint32_t());
    case ncclInt64:
      return function(std::int64_t());
    case ncclUint64:
      return function(std::uint64_t());
    case ncclFloat16:
      return function(c10::Half());
    case ncclBfloat16:
      return function(c10::BFloat16());
    case ncclFloat32:
      return function(float());
    case ncclFloat64:
      return function(double());
    default:
      std::fprintf(stderr, "virtual NCCL: data type %d cannot be reduced\n", type);
      std::abort();
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

void put(Communicator& c, const Call& call, const Piece& piece, const char* send, const Factor& factor) {
  char* slot = c.slot(c.rank());
  const std::size_t parts = in_parts(call.kind) ? static_cast<std::size_t>(c.ranks()) : 1;
  if (call.kind == Kind::kBroadcast && c.rank() != call.root) return;
  for (std::size_t part = 0; part < parts; ++part) {
    char* const to = slot + part * piece.stride;
    copy(to, send + part * piece.total + piece.begin, piece.bytes);
    if (!factor) continue;
    for_type(call.type, [&](auto value) {
      scale_as<decltype(value)>(to, piece.bytes / sizeof value, static_cast<const char*>(factor()));
    });
  }
}

void get(Communicator& c, const Call& call, const Piece& piece, char* receive) {
  const auto own_part = static_cast<std::size_t>(c.rank()) * piece.stride;
  const std::size_t count = piece.bytes / size_of(call.type);
  std::vector<const char*> inputs;
  for (int rank = 0; rank < c.ranks(); ++rank) inputs.push_back(c.slot(rank) + (in_parts(call.kind) ? own_part : 0));
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

std::string Call::name() const { return "nccl" + std::string(kNames[static_cast<int>(kind)]); }

std::string Call::text() const {
  return name() + " number " + std::to_string(sequence) + " of " + std::to_string(count) + " elements, type " +
         std::to_string(type) + ", operation " + std::to_string(op) + ", root " + std::to_string(root);
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
  for_type(type, [&](auto value) { reduce_as<decltype(value)>(out, inputs, count, op); });
}

bool Communicator::check_calls(const Call& call) {
  page(rank_).call = call;
  if (!stream_barrier()) return false;
  for (int rank = 0; rank < ranks_; ++rank)
    if (page(rank).call != call) report_mismatch(*this, rank, call, page(rank).call);
  return !aborted_;
}

void Communicator::run(Call call, const char* send, char* receive, const Factor& factor) {
  call.sequence = sequence_++;
  run_fault(kNames[static_cast<int>(call.kind)]);
  if (aborted_ || !check_calls(call)) return;  // The other ranks must not see calls after the abort.
  const std::size_t stride = kSlotBytes / static_cast<std::size_t>(in_parts(call.kind) ? ranks_ : 1) / 64 * 64;
  const std::size_t total = call.count * size_of(call.type);
  for (std::size_t begin = 0; begin < total; begin += stride) {
    const Piece piece{begin, std::min(stride, total - begin), total, stride};
    put(*this, call, piece, send, factor);
    if (!stream_barrier()) return;
    get(*this, call, piece, receive);
    if (!stream_barrier()) return;
  }
}

}  // namespace vgpu::nccl
