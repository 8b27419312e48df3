#include "comm/shm/transfers.h"

#include <algorithm>
#include <cstring>

namespace ddpkit::shm {
namespace {

/// Returns whether this rank receives the result of a reduction. For reduce, only the root does.
bool wants_result(const Staging& staging, const CollectiveArgs& args) {
  return args.kind != CollectiveKind::kReduce || args.root == staging.rank;
}

/// Copies the slices that the peers reduce. This rank reduces its slice directly from the input.
void copy_others_slices(const Staging& staging, const Operation& operation, std::uint64_t ticket) {
  const std::size_t size = operation.element_size();
  const Span chunk = chunk_of(operation.args.numel, kSlotBytes / size, ticket - operation.first_ticket);
  const auto* input = static_cast<const std::byte*>(operation.args.input) + chunk.begin * size;
  for (int r = 0; r < staging.world_size(); ++r) {
    const Span slice = slice_of(chunk.count, size, r, staging.world_size());
    if (r != staging.rank && slice.count != 0)
      std::memcpy(staging.slot(staging.rank, ticket) + slice.begin * size, input + slice.begin * size,
                  slice.count * size);
  }
}

/// Reduces all ranks' parts, of `numel` elements each, to `output`.
void reduce_parts(const CollectiveArgs& args, const std::vector<void*>& parts, std::size_t numel, void* output) {
  kernels::reduce({.dtype = args.dtype,
                   .op = args.op,
                   .numel = numel,
                   .inputs = parts.data(),
                   .input_count = parts.size(),
                   .outputs = &output,
                   .output_count = 1});
}

void reduce_pieces_to_outputs(Staging& staging, const Operation& operation) {
  const CollectiveArgs& args = operation.args;
  const auto ranks = static_cast<std::size_t>(staging.world_size());
  for (std::size_t p = 0; p < args.tensors.size(); ++p) {
    const CoalescedTensor& tensor = args.tensors[p];
    if (tensor.count == 0) continue;
    for (std::size_t r = 0; r < ranks; ++r)
      staging.parts[r] =
          static_cast<std::byte*>(operation.parts[p * ranks + r]) + tensor.begin * operation.element_size();
    reduce_parts(args, staging.parts, tensor.count, tensor.output);
  }
}

void reduce_in_place(Staging& staging, const Operation& operation) {
  const CollectiveArgs& args = operation.args;
  const std::size_t size = operation.element_size();
  const std::size_t line = kCacheLine / size;
  const auto ranks = static_cast<std::size_t>(staging.world_size());
  const std::size_t pieces = operation.parts.size() / ranks;
  const auto numel_of = [&](std::size_t p) { return args.tensors.empty() ? args.numel : args.tensors[p].numel; };
  // This rank's share of the cache lines of all pieces, one piece after the other.
  std::size_t lines = 0;
  for (std::size_t p = 0; p < pieces; ++p) lines += (numel_of(p) + line - 1) / line;
  const Span share = slice_of(lines, kCacheLine, staging.rank, staging.world_size());
  std::size_t begin = 0;
  for (std::size_t p = 0; p < pieces && begin < share.begin + share.count; ++p) {
    const std::size_t end = begin + (numel_of(p) + line - 1) / line;
    const std::size_t from = (std::max(begin, share.begin) - begin) * line;
    const std::size_t to = std::min((std::min(end, share.begin + share.count) - begin) * line, numel_of(p));
    begin = end;
    if (from >= to) continue;
    // In rank order: the order of the sum, and so its bits, do not depend on the rank that adds.
    for (std::size_t r = 0; r < ranks; ++r)
      staging.parts[r] = static_cast<std::byte*>(operation.parts[p * ranks + r]) + from * size;
    kernels::reduce({.dtype = args.dtype,
                     .op = args.op,
                     .numel = to - from,
                     .inputs = staging.parts.data(),
                     .input_count = staging.parts.size(),
                     .outputs = staging.parts.data(),
                     .output_count = staging.parts.size()});
  }
}

void move_in_place(Staging& staging, const Operation& operation) {
  const CollectiveArgs& args = operation.args;
  const auto self = static_cast<std::size_t>(staging.rank);
  const auto ranks = static_cast<std::size_t>(staging.world_size());
  switch (args.kind) {
    case CollectiveKind::kBroadcast:
      if (args.root != staging.rank)
        std::memcpy(args.output, operation.parts[static_cast<std::size_t>(args.root)], operation.bytes());
      break;
    case CollectiveKind::kAllGather:
      // Each rank starts with its own part, so that not all ranks read from the same rank.
      for (std::size_t i = 0; i < ranks; ++i) {
        const std::size_t r = (self + i) % ranks;
        void* const output = args.output_from(r);
        if (output != operation.parts[r]) std::memcpy(output, operation.parts[r], operation.bytes());
      }
      break;
    case CollectiveKind::kReduceScatter:
      for (std::size_t r = 0; r < ranks; ++r)
        staging.parts[r] = static_cast<std::byte*>(operation.parts[r]) + self * operation.bytes();
      reduce_parts(args, staging.parts, args.numel, args.output);
      break;
    case CollectiveKind::kReduceScatterCoalesced:
      reduce_pieces_to_outputs(staging, operation);
      break;
    default:
      reduce_in_place(staging, operation);
  }
}

}  // namespace

void copy_in(const Staging& staging, const Operation& operation, std::uint64_t ticket) {
  const CollectiveArgs& args = operation.args;
  const std::size_t size = operation.element_size();
  const SlotLayout& layout = operation.layout;
  const std::size_t step = layout.piece_bytes / size;
  const std::uint64_t chunk = ticket - operation.first_ticket;
  const auto self = static_cast<std::size_t>(staging.rank);  // This rank's piece for itself needs no slot.
  const auto copy_piece = [&](std::size_t piece, const void* input, std::size_t numel) {
    const Span span = chunk_of(numel, step, chunk);
    if (span.count == 0) return;
    std::memcpy(staging.piece(staging.rank, ticket, layout, piece),
                static_cast<const std::byte*>(input) + span.begin * size, span.count * size);
  };
  switch (args.kind) {
    case CollectiveKind::kBarrier:
    case CollectiveKind::kAllReduceCoalesced:
    case CollectiveKind::kReduceScatterCoalesced:
      break;
    case CollectiveKind::kBroadcast:
      if (args.root == staging.rank) copy_piece(0, args.input, args.numel);
      break;
    case CollectiveKind::kScatter:
      if (args.root != staging.rank) break;
      [[fallthrough]];
    case CollectiveKind::kReduceScatter:
      for (std::size_t r = 0; r < layout.pieces; ++r) {
        if (r != self) copy_piece(r, args.input_for(r), args.numel);
      }
      break;
    case CollectiveKind::kAllToAll:
      for (std::size_t r = 0; r < layout.pieces; ++r) {
        const std::uint64_t count = args.send_numel[r];
        std::memcpy(staging.slot(staging.rank, ticket) + r * sizeof count, &count, sizeof count);
        if (r != self) copy_piece(r, args.inputs[r], args.send_numel[r]);
      }
      break;
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
      if (operation.shared_reduce) {
        copy_others_slices(staging, operation, ticket);
        break;
      }
      [[fallthrough]];
    case CollectiveKind::kAllGather:
    case CollectiveKind::kGather:
      copy_piece(0, args.input, args.numel);
      break;
  }
}

void reduce_slice(Staging& staging, const Operation& operation, std::uint64_t ticket) {
  if (operation.path == Path::kSymmetric) return move_in_place(staging, operation);
  const CollectiveArgs& args = operation.args;
  const std::size_t size = operation.element_size();
  const Span chunk = chunk_of(args.numel, kSlotBytes / size, ticket - operation.first_ticket);
  const Span slice = slice_of(chunk.count, size, staging.rank, staging.world_size());
  if (slice.count == 0) return;
  const auto self = static_cast<std::size_t>(staging.rank);
  for (int r = 0; r < staging.world_size(); ++r)
    staging.parts[static_cast<std::size_t>(r)] = staging.slot(r, ticket) + slice.begin * size;
  // To this rank's slot, from which the others copy it, and to this rank's output.
  const std::size_t begin = (chunk.begin + slice.begin) * size;
  void* outputs[] = {staging.parts[self], args.output ? static_cast<std::byte*>(args.output) + begin : nullptr};
  staging.parts[self] = const_cast<std::byte*>(static_cast<const std::byte*>(args.input)) + begin;
  kernels::reduce({.dtype = args.dtype,
                   .op = args.op,
                   .numel = slice.count,
                   .inputs = staging.parts.data(),
                   .input_count = staging.parts.size(),
                   .outputs = outputs,
                   .output_count = wants_result(staging, args) ? 2u : 1u});
}

void copy_out(Staging& staging, const Operation& operation, std::uint64_t ticket, std::optional<std::uint64_t> along) {
  const CollectiveArgs& args = operation.args;
  if (operation.path == Path::kSymmetric) return;
  const std::size_t size = operation.element_size();
  const SlotLayout& layout = operation.layout;
  const std::size_t step = layout.piece_bytes / size;
  const std::uint64_t chunk = ticket - operation.first_ticket;
  const auto own = static_cast<std::size_t>(staging.rank);
  // Returns piece `piece` of rank `rank`: `input` for this rank, otherwise in the rank's slot.
  const auto given = [&](int rank, std::size_t piece, const void* input) {
    return rank == staging.rank ? static_cast<const std::byte*>(input) + chunk * step * size
                                : staging.piece(rank, ticket, layout, piece);
  };
  const auto copy_piece = [&](void* output, std::size_t numel, const std::byte* from) {
    const Span span = chunk_of(numel, step, chunk);
    std::byte* to = static_cast<std::byte*>(output) + span.begin * size;
    if (span.count != 0 && to != from) std::memcpy(to, from, span.count * size);
  };
  const auto reduce_piece = [&](std::size_t piece, const void* input) {
    const Span span = chunk_of(args.numel, step, chunk);
    if (span.count == 0) return;
    for (int r = 0; r < staging.world_size(); ++r)
      staging.parts[static_cast<std::size_t>(r)] = const_cast<std::byte*>(given(r, piece, input));
    void* output = static_cast<std::byte*>(args.output) + span.begin * size;
    kernels::reduce({.dtype = args.dtype,
                     .op = args.op,
                     .numel = span.count,
                     .inputs = staging.parts.data(),
                     .input_count = staging.parts.size(),
                     .outputs = &output,
                     .output_count = 1,
                     .copy_from = along ? static_cast<const std::byte*>(args.input) +
                                              (*along - operation.first_ticket) * step * size
                                        : nullptr,
                     .copy_to = along ? staging.slot(staging.rank, *along) : nullptr});
  };
  switch (args.kind) {
    case CollectiveKind::kBarrier:
    case CollectiveKind::kAllReduceCoalesced:
    case CollectiveKind::kReduceScatterCoalesced:
      break;
    case CollectiveKind::kBroadcast:
      if (args.root != staging.rank) copy_piece(args.output, args.numel, given(args.root, 0, nullptr));
      break;
    case CollectiveKind::kScatter:
      copy_piece(args.output, args.numel,
                 given(args.root, own, args.root == staging.rank ? args.input_for(own) : nullptr));
      break;
    case CollectiveKind::kReduceScatter:
      reduce_piece(own, args.input_for(own));
      break;
    case CollectiveKind::kAllToAll:
      for (int r = 0; r < staging.world_size(); ++r) {
        const auto index = static_cast<std::size_t>(r);
        copy_piece(args.outputs[index], args.receive_numel[index], given(r, own, args.inputs[own]));
      }
      break;
    case CollectiveKind::kGather:
      if (args.root != staging.rank) break;
      [[fallthrough]];
    case CollectiveKind::kAllGather:
      for (int r = 0; r < staging.world_size(); ++r)
        copy_piece(args.output_from(static_cast<std::size_t>(r)), args.numel, given(r, 0, args.input));
      break;
    case CollectiveKind::kReduce:
    case CollectiveKind::kAllReduce: {
      if (!wants_result(staging, args)) break;
      if (!operation.shared_reduce) return reduce_piece(0, args.input);
      const Span span = chunk_of(args.numel, step, chunk);
      std::byte* output = static_cast<std::byte*>(args.output) + span.begin * size;
      for (int r = 0; r < staging.world_size(); ++r) {
        const Span slice = slice_of(span.count, size, r, staging.world_size());
        if (r != staging.rank && slice.count != 0)
          std::memcpy(output + slice.begin * size, staging.slot(r, ticket) + slice.begin * size, slice.count * size);
      }
      break;
    }
  }
}

}  // namespace ddpkit::shm
