// Functions of the shm backend beyond c10d::Backend: synchronous collectives without Work, symmetric memory, and
// in-place collectives.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/arena.h"
#include "comm/backends/shm_arguments.h"
#include "comm/backends/shm_backend.h"

namespace ddpkit {

using c10d::OpType;
using shm::CollectiveKind;
using shm::Request;

void ShmBackend::all_reduce_blocking(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  check_tensor(tensor, "all_reduce");
  RECORD_USER_SCOPE_WITH_INPUTS("shm:all_reduce", std::vector<c10::IValue>{tensor});
  if (!tensor.is_contiguous() || op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    engine_->wait(engine_->post(all_reduce_request(tensor, op)));
    return;
  }
  engine_->run({.kind = CollectiveKind::kAllReduce,
                .dtype = data_type(tensor),
                .op = reduction(op, tensor, "all_reduce"),
                .input = tensor.data_ptr(),
                .output = tensor.data_ptr(),
                .numel = element_count(tensor)});
}

void ShmBackend::all_gather_blocking(const at::Tensor& output, const at::Tensor& input) {
  check_stacked(output, input, "all_gather");
  RECORD_USER_SCOPE_WITH_INPUTS("shm:all_gather", std::vector<c10::IValue>{input});
  const at::Tensor dense = input.contiguous();
  engine_->run(dense_all_gather_request(output, dense));
}

void ShmBackend::reduce_scatter_blocking(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) {
  if (!output.is_contiguous() || op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    engine_->wait(engine_->post(reduce_scatter_request(output, input, op)));
    return;
  }
  check_stacked(input, output, "reduce_scatter");
  RECORD_USER_SCOPE_WITH_INPUTS("shm:reduce_scatter", std::vector<c10::IValue>{input});
  engine_->run(dense_reduce_scatter_request(output, input, op));
}

void ShmBackend::barrier_blocking() {
  RECORD_USER_SCOPE("shm:barrier");
  engine_->run({.kind = CollectiveKind::kBarrier});
}

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  if (size <= 0) return at::empty({size}, options.device(at::kCPU));
  auto segment = engine_->allocate(static_cast<std::size_t>(size) * options.dtype().itemsize());
  void* data = segment->base[static_cast<std::size_t>(rank_)];
  return at::from_blob(
      data, {size}, [segment](void*) mutable { segment.reset(); }, options.device(at::kCPU));
}

ShmBackend::WorkPtr ShmBackend::all_reduce_coalesced(const Tensors& tensors, const c10d::ReduceOp& op) {
  return reduce_pieces(tensors, nullptr, op);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_coalesced(const Tensors& tensors, const Tensors& slices,
                                                         const c10d::ReduceOp& op) {
  return reduce_pieces(tensors, &slices, op);
}

/// All-reduce; with slices, reduce-scatter.
ShmBackend::WorkPtr ShmBackend::reduce_pieces(const Tensors& tensors, const Tensors* slices, const c10d::ReduceOp& op) {
  const char* call = slices ? "reduce_scatter_coalesced" : "all_reduce_coalesced";
  std::vector<Request> requests;
  for (std::size_t begin = 0; begin < tensors.size(); begin += shm::kMaxPieces) {
    const std::size_t end = std::min(tensors.size(), begin + shm::kMaxPieces);
    Request request{.kind = slices ? CollectiveKind::kReduceScatterCoalesced : CollectiveKind::kAllReduceCoalesced,
                    .dtype = data_type(tensors[begin]),
                    .op = reduction(op, tensors[begin], call)};
    for (std::size_t i = begin; i < end; ++i) {
      const at::Tensor& tensor = tensors[i];
      check_tensor(tensor, call);
      if (!tensor.is_non_overlapping_and_dense() || tensor.scalar_type() != tensors[0].scalar_type())
        throw InvalidArgument(fmt::format("{}: the tensors must be dense and of one type", call));
      const std::size_t numel = element_count(tensor);
      request.pieces.push_back(
          {.data = tensor.data_ptr(), .numel = numel, .slice = slices ? (*slices)[i].data_ptr() : nullptr});
      request.numel += numel;
    }
    const auto part = [&](const Tensors& all) {
      return Tensors(all.begin() + static_cast<std::ptrdiff_t>(begin), all.begin() + static_cast<std::ptrdiff_t>(end));
    };
    request.keep_alive =
        std::make_shared<std::pair<Tensors, Tensors>>(part(tensors), slices ? part(*slices) : Tensors());
    requests.push_back(std::move(request));
  }
  return start(std::move(requests), slices ? OpType::REDUCE_SCATTER : OpType::ALLREDUCE_COALESCED, {}, kNoTimeout,
               tensors);
}

std::shared_ptr<ArenaLease> ShmBackend::open_arena(std::size_t capacity, std::size_t reserve) {
  // Ranks release a lease at different times. A lease may be active here and released elsewhere.
  auto in_force = arena_.lock();
  std::int64_t agreed[] = {in_force ? 1 : 0, ArenaLease::taken() ? 0 : 1, static_cast<std::int64_t>(capacity)};
  engine_->run({.kind = CollectiveKind::kAllReduce,
                .dtype = shm::DataType::kInt64,
                .op = shm::Reduction::kMin,
                .input = agreed,
                .output = agreed,
                .numel = std::size(agreed)});
  if (agreed[0] == 1) return in_force;
  if (agreed[1] == 0 || size_ == 1) return nullptr;
  auto segment = engine_->allocate(static_cast<std::size_t>(agreed[2]), shm::Mapping::Fill::kOnTouch);
  auto lease = std::make_shared<ArenaLease>(std::move(segment), rank_, reserve);
  arena_ = lease;
  return lease;
}

}  // namespace ddpkit
