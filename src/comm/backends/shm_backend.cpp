#include "comm/backends/shm_backend.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include <ddpkit/comm/shm_backend.h>
#include <ddpkit/error.h>

#include "comm/arena_allocator.h"
#include "comm/backends/shm_arguments.h"
#include "comm/backends/shm_sparse.h"
#include "comm/backends/shm_work.h"
#include "comm/shm_rendezvous.h"
#include "comm/timeout.h"

namespace ddpkit {

using c10d::OpType;
using shm::CollectiveArgs;
using shm::CollectiveKind;

ShmBackend::ShmBackend(std::shared_ptr<shm::Engine> engine, std::chrono::milliseconds timeout)
    : Backend(engine->rank(), engine->world_size()),
      engine_(std::move(engine)),
      requests_(rank_, size_),
      timeout_(timeout) {}

ShmBackend::~ShmBackend() = default;

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<Options>("shm", timeout_);
}

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  engine_->set_timeout(timeout);
}

ShmBackend::WorkPtr ShmBackend::start(std::vector<CollectiveArgs> requests, OpType type, Tensors outputs,
                                      std::chrono::milliseconds timeout, at::TensorList inputs) const {
  auto work = c10::make_intrusive<ShmWork>(engine_, type, std::move(outputs), timeout, inputs);
  work->reserve(requests.size());
  for (CollectiveArgs& request : requests) work->add(engine_->post(std::move(request)));
  return work;
}

ShmBackend::WorkPtr ShmBackend::start(CollectiveArgs request, OpType type, Tensors outputs,
                                      std::chrono::milliseconds timeout, at::TensorList inputs) const {
  auto work = c10::make_intrusive<ShmWork>(engine_, type, std::move(outputs), timeout, inputs);
  work->add(engine_->post(std::move(request)));
  return work;
}

ShmBackend::WorkPtr ShmBackend::start(shm::MessageHandle message, OpType type, const at::Tensor& tensor) const {
  auto work = c10::make_intrusive<ShmWork>(engine_, type, Tensors{tensor}, c10d::kUnsetTimeout, tensor);
  work->add(engine_->post(std::move(message)));
  return work;
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse()) {
    auto work = c10::make_intrusive<ShmWork>(engine_, OpType::_ALLREDUCE_SPARSE, tensors, kNoTimeout, tensors);
    all_reduce_sparse(*engine_, tensors[0], options.reduceOp);
    return work;
  }
  const at::Tensor tensor = only(tensors, "all_reduce");
  return start(requests_.all_reduce(tensor, options.reduceOp), OpType::ALLREDUCE, {tensor}, options.timeout, tensors);
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  for (const at::Tensor& tensor : tensors) check_tensor(tensor, "all_reduce_coalesced");
  std::vector<CollectiveArgs> requests;
  for (const at::Tensor& tensor : tensors) requests.push_back(requests_.all_reduce(tensor, options.reduceOp));
  return start(std::move(requests), OpType::ALLREDUCE_COALESCED, tensors, options.timeout, tensors);
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor tensor = only(tensors, "reduce");
  return start(requests_.reduce(tensor, options.rootRank, options.reduceOp), OpType::REDUCE, {tensor}, options.timeout,
               tensors);
}

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = only(tensors, "broadcast");
  return start(requests_.broadcast(tensor, options.rootRank), OpType::BROADCAST, {tensor}, options.timeout, tensors);
}

ShmBackend::WorkPtr ShmBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  const at::Tensor input = only(inputs, "all_gather");
  if (outputs.size() != 1) throw InvalidArgument("all_gather: one list of outputs is needed");
  return start(requests_.all_gather(outputs[0], input, "all_gather"), OpType::ALLGATHER, outputs[0], options.timeout,
               inputs);
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  return start(requests_.all_gather(output, input), OpType::_ALLGATHER_BASE, {output}, options.timeout, input);
}

ShmBackend::WorkPtr ShmBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  // outputs[rank][tensor]
  Tensors flat;
  if (outputs.size() != static_cast<std::size_t>(size_))
    throw InvalidArgument(fmt::format("all_gather_coalesced: outputs for {} ranks, not {}", size_, outputs.size()));
  std::vector<CollectiveArgs> requests;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], "all_gather_coalesced");
    Tensors of_tensor;
    for (const Tensors& list : outputs) {
      if (list.size() != inputs.size())
        throw InvalidArgument("all_gather_coalesced: every rank's list needs an output for each input");
      of_tensor.push_back(list[i]);
      flat.push_back(list[i]);
    }
    requests.push_back(requests_.all_gather(of_tensor, inputs[i], "all_gather_coalesced"));
  }
  return start(std::move(requests), OpType::ALLGATHER_COALESCED, flat, options.timeout, inputs);
}

ShmBackend::WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& options) {
  if (outputs.size() != inputs.size())
    throw InvalidArgument("all_gather_into_tensor_coalesced: as many outputs as inputs are needed");
  std::vector<CollectiveArgs> requests;
  for (std::size_t i = 0; i < inputs.size(); ++i) requests.push_back(requests_.all_gather(outputs[i], inputs[i]));
  return start(std::move(requests), OpType::COALESCED, outputs, options.timeout, inputs);
}

ShmBackend::WorkPtr ShmBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const at::Tensor input = only(inputs, "gather");
  return start(requests_.gather(outputs, input, options.rootRank), OpType::GATHER,
               outputs.empty() ? Tensors() : outputs[0], options.timeout, inputs);
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& options) {
  const at::Tensor output = only(outputs, "scatter");
  return start(requests_.scatter(output, inputs, options.rootRank), OpType::SCATTER, {output}, options.timeout,
               inputs.empty() ? Tensors() : inputs[0]);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const at::Tensor output = only(outputs, "reduce_scatter");
  if (inputs.size() != 1) throw InvalidArgument("reduce_scatter: one list of inputs is needed");
  return start(requests_.reduce_scatter(output, inputs[0], options.reduceOp), OpType::REDUCE_SCATTER, {output},
               options.timeout, inputs[0]);
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  return start(requests_.reduce_scatter(output, input, options.reduceOp), OpType::_REDUCE_SCATTER_BASE, {output},
               options.timeout, input);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& options) {
  if (outputs.size() != inputs.size())
    throw InvalidArgument("reduce_scatter_tensor_coalesced: as many outputs as inputs are needed");
  std::vector<CollectiveArgs> requests;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    requests.push_back(requests_.reduce_scatter(outputs[i], inputs[i], options.reduceOp));
  return start(std::move(requests), OpType::COALESCED, outputs, options.timeout, inputs);
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return start(requests_.all_to_all(outputs, inputs), OpType::ALLTOALL, outputs, options.timeout, inputs);
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  const Tensors outputs = requests_.split(output, output_splits, "output"),
                inputs = requests_.split(input, input_splits, "input");
  return start(requests_.all_to_all(outputs, inputs), OpType::ALLTOALL_BASE, {output}, options.timeout, input);
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int destination, int tag) {
  const at::Tensor tensor = only(tensors, "send");
  return start(requests_.send(tensor, destination, tag), OpType::SEND, tensor);
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int source, int tag) {
  const at::Tensor tensor = only(tensors, "recv");
  return start(requests_.receive(tensor, source, tag), OpType::RECV, tensor);
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor tensor = only(tensors, "recv");
  if (size_ == 1) throw InvalidArgument("recv: there is no other rank to receive from");
  return start(requests_.receive(tensor, shm::kAnySource, tag), OpType::RECVANYSOURCE, tensor);
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return start(CollectiveArgs{.kind = CollectiveKind::kBarrier}, OpType::BARRIER, {}, options.timeout, {});
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  start(CollectiveArgs{.kind = CollectiveKind::kBarrier, .monitored = true, .names_all = wait_all_ranks},
        OpType::BARRIER, {}, options.timeout, {})
      ->wait(options.timeout.count() > 0 ? options.timeout : kNoTimeout);
}

c10::intrusive_ptr<c10d::Backend> ShmBackend::split(const Ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                                    const Ptr<Options>& options) {
  const auto own = std::find(ranks.begin(), ranks.end(), rank_);
  if (own == ranks.end()) return nullptr;
  return create_shm_backend(store, static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size()),
                            options ? options->timeout : timeout_);
}

c10::intrusive_ptr<Backend> create_shm_part(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                            std::chrono::milliseconds timeout, int first_rank) {
  return c10::make_intrusive<ShmBackend>(connect_engine(store, rank, world_size, timeout, first_rank),
                                         clamp_timeout(timeout));
}

c10::intrusive_ptr<c10d::Backend> create_shm_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                     int world_size, std::chrono::milliseconds timeout) {
  return create_shm_part(store, rank, world_size, timeout);
}

Backend::Ptr<Backend> ShmBackend::subgroup(const Ptr<c10d::Store>& store, const std::vector<int>& /*ranks*/,
                                           const LaunchEnvironment& part) {
  return create_shm_part(store, part.rank, part.world_size, timeout_);
}

Backend::Remainder ShmBackend::shrink(int min_ranks) {
  Remainder remainder;
  auto engine = engine_->shrink(min_ranks, remainder.old_rank_of);
  remainder.backend = c10::make_intrusive<ShmBackend>(share(std::move(engine)), timeout_);
  return remainder;
}

int ShmBackend::name() const noexcept { return engine_->name(); }

std::atomic<std::uint64_t>* ShmBackend::join_step() noexcept { return is_elastic() ? &engine_->join_step() : nullptr; }

Backend::Ptr<Backend> ShmBackend::connect_with_new(const Ptr<c10d::Store>& store, int rank,
                                                   const std::vector<int>& names) {
  return c10::make_intrusive<ShmBackend>(ddpkit::connect_with_new(engine_, store, rank, names), timeout_);
}

void ShmBackend::follow(const Backend& former) noexcept {
  const auto& before = static_cast<const ShmBackend&>(former);
  engine_->follow(*before.engine_);
  former_arena_ = before.former_arena_ ? before.former_arena_ : before.arena_.lock();
}

void ShmBackend::all_reduce_blocking(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  check_tensor(tensor, "all_reduce");
  RECORD_USER_SCOPE_WITH_INPUTS("shm:all_reduce", std::vector<c10::IValue>{tensor});
  if (!tensor.is_contiguous() || op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    engine_->wait(engine_->post(requests_.all_reduce(tensor, op)));
    return;
  }
  engine_->run(requests_.dense_all_reduce(tensor, op));
}

void ShmBackend::broadcast_blocking(const at::Tensor& tensor, int root) {
  check_tensor(tensor, "broadcast");
  RECORD_USER_SCOPE_WITH_INPUTS("shm:broadcast", std::vector<c10::IValue>{tensor});
  if (!tensor.is_contiguous()) {
    engine_->wait(engine_->post(requests_.broadcast(tensor, root)));
    return;
  }
  engine_->run(requests_.dense_broadcast(tensor, root));
}

void ShmBackend::all_gather_blocking(const at::Tensor& output, const at::Tensor& input) {
  requests_.check_stacked(output, input, "all_gather");
  RECORD_USER_SCOPE_WITH_INPUTS("shm:all_gather", std::vector<c10::IValue>{input});
  const at::Tensor dense = input.contiguous();
  engine_->run(requests_.dense_all_gather(output, dense));
}

void ShmBackend::reduce_scatter_blocking(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) {
  if (!output.is_contiguous() || op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    engine_->wait(engine_->post(requests_.reduce_scatter(output, input, op)));
    return;
  }
  requests_.check_stacked(input, output, "reduce_scatter");
  RECORD_USER_SCOPE_WITH_INPUTS("shm:reduce_scatter", std::vector<c10::IValue>{input});
  engine_->run(requests_.dense_reduce_scatter(output, output.data_ptr(), input, op));
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
  return start(requests_.coalesced(tensors, {}, op), OpType::ALLREDUCE_COALESCED, {}, kNoTimeout, tensors);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_coalesced(const Tensors& tensors, const at::Tensor& shard,
                                                         const c10d::ReduceOp& op) {
  return start(requests_.coalesced(tensors, shard, op), OpType::REDUCE_SCATTER, {}, kNoTimeout, tensors);
}

std::shared_ptr<ScopedArena> ShmBackend::open_arena(std::size_t capacity, std::size_t reserve) {
  // A single rank shares no memory, but memory that is kept from step to step has the same benefit.
  // Ranks release an arena at different times. An arena may be active here and released elsewhere.
  auto in_force = arena_.lock();
  std::int64_t agreed[] = {in_force ? 1 : 0, !ScopedArena::taken() || former_arena_ ? 1 : 0,
                           static_cast<std::int64_t>(capacity)};
  engine_->run({.kind = CollectiveKind::kAllReduce,
                .dtype = shm::DataType::kInt64,
                .op = shm::Reduction::kMin,
                .input = agreed,
                .output = agreed,
                .numel = std::size(agreed)});
  if (agreed[0] == 1) return in_force;
  if (agreed[1] == 0) {
    former_arena_.reset();
    return nullptr;
  }
  const auto bytes = static_cast<std::size_t>(agreed[2]);
  shm::Mapping pages = former_arena_ ? former_arena_->pages() : shm::Mapping();
  if (pages.size() != bytes || pages.descriptor() < 0) {
    pages = {};
    former_arena_.reset();
  }
  auto segment = engine_->allocate(bytes, shm::Mapping::Populate::kLazy, std::move(pages));
  auto arena = std::exchange(former_arena_, nullptr);
  if (arena) {
    arena->move_to(std::move(segment), rank_);
  } else {
    arena = std::make_shared<ScopedArena>(std::move(segment), rank_, reserve);
  }
  arena_ = arena;
  return arena;
}

std::shared_ptr<shm::SymmetricSegment> ShmBackend::allocate_segment(std::size_t bytes) {
  auto segment = engine_->allocate(bytes, shm::Mapping::Populate::kLazy);
  segment->mappings[static_cast<std::size_t>(rank_)].close_descriptor();
  return segment;
}

}  // namespace ddpkit
