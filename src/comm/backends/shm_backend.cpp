#include "comm/backends/shm_backend.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include <ddpkit/comm/shm_backend.h>
#include <ddpkit/error.h>

#include "comm/backends/shm_arguments.h"
#include "comm/backends/shm_rendezvous.h"
#include "comm/backends/shm_work.h"
#include "comm/timeout.h"

namespace ddpkit {

using c10d::OpType;
using shm::CollectiveKind;
using shm::PendingHandle;
using shm::Request;

ShmBackend::ShmBackend(std::shared_ptr<shm::Engine> engine, std::chrono::milliseconds timeout)
    : Backend(engine->rank(), engine->world_size()), engine_(std::move(engine)), timeout_(timeout) {}

ShmBackend::~ShmBackend() = default;

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<Options>("shm", timeout_);
}

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  engine_->set_timeout(timeout);
}

ShmBackend::WorkPtr ShmBackend::start(std::vector<Request> requests, OpType type, Tensors outputs,
                                      std::chrono::milliseconds timeout, at::TensorList inputs) const {
  auto work = c10::make_intrusive<ShmWork>(engine_, type, std::move(outputs), timeout, inputs);
  work->reserve(requests.size());
  for (Request& request : requests) work->add(engine_->post(std::move(request)));
  return work;
}

ShmBackend::WorkPtr ShmBackend::start(Request request, OpType type, Tensors outputs, std::chrono::milliseconds timeout,
                                      at::TensorList inputs) const {
  auto work = c10::make_intrusive<ShmWork>(engine_, type, std::move(outputs), timeout, inputs);
  work->add(engine_->post(std::move(request)));
  return work;
}

Request ShmBackend::all_reduce_request(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
  const at::Tensor input = contribution(op, tensor);
  Outputs outputs("all_reduce");
  const at::Tensor output = outputs.add(tensor);
  Request request{.kind = CollectiveKind::kAllReduce,
                  .dtype = data_type(tensor),
                  .op = reduction(op, tensor, "all_reduce"),
                  .input = input.data_ptr(),
                  .output = output.data_ptr(),
                  .numel = element_count(tensor)};
  outputs.attach_to(request, {input});
  return request;
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse())
    return all_reduce_sparse(tensors[0], options.reduceOp);
  const at::Tensor tensor = only(tensors, "all_reduce");
  return start(all_reduce_request(tensor, options.reduceOp), OpType::ALLREDUCE, {tensor}, options.timeout, tensors);
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  for (const at::Tensor& tensor : tensors) check_tensor(tensor, "all_reduce_coalesced");
  std::vector<Request> requests;
  for (const at::Tensor& tensor : tensors) requests.push_back(all_reduce_request(tensor, options.reduceOp));
  return start(std::move(requests), OpType::ALLREDUCE_COALESCED, tensors, options.timeout, tensors);
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor tensor = only(tensors, "reduce");
  check_root(options.rootRank, size_, "reduce");
  const at::Tensor input = contribution(options.reduceOp, tensor);
  Outputs outputs("reduce");
  const bool is_root = options.rootRank == rank_;
  Request request{.kind = CollectiveKind::kReduce,
                  .dtype = data_type(tensor),
                  .op = reduction(options.reduceOp, tensor, "reduce"),
                  .root = static_cast<int>(options.rootRank),
                  .input = input.data_ptr(),
                  .output = is_root ? outputs.add(tensor).data_ptr() : nullptr,
                  .numel = element_count(tensor)};
  outputs.attach_to(request, {input});
  return start(std::move(request), OpType::REDUCE, {tensor}, options.timeout, tensors);
}

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = only(tensors, "broadcast");
  check_root(options.rootRank, size_, "broadcast");
  const bool is_root = options.rootRank == rank_;
  const at::Tensor input = is_root ? tensor.contiguous() : at::Tensor();
  Outputs outputs("broadcast");
  Request request{.kind = CollectiveKind::kBroadcast,
                  .dtype = data_type(tensor),
                  .root = static_cast<int>(options.rootRank),
                  .input = is_root ? input.data_ptr() : nullptr,
                  .output = is_root ? input.data_ptr() : outputs.add(tensor).data_ptr(),
                  .numel = element_count(tensor)};
  outputs.attach_to(request, {input, tensor});
  return start(std::move(request), OpType::BROADCAST, {tensor}, options.timeout, tensors);
}

Request ShmBackend::all_gather_request(const Tensors& outputs, const at::Tensor& input) const {
  const at::Tensor dense = input.contiguous();
  Outputs results("all_gather");
  Request request{.kind = CollectiveKind::kAllGather,
                  .dtype = data_type(input),
                  .input = dense.data_ptr(),
                  .numel = element_count(input)};
  for (const at::Tensor& output : outputs) request.outputs.push_back(results.add(output).data_ptr());
  results.attach_to(request, {dense});
  return request;
}

Request ShmBackend::all_gather_request(const at::Tensor& output, const at::Tensor& input) const {
  check_stacked(output, input, "all_gather");
  const at::Tensor dense = input.contiguous();
  Request request = dense_all_gather_request(output, dense);
  Outputs results("all_gather");
  results.add(output);
  results.attach_to(request, {dense});
  return request;
}

ShmBackend::WorkPtr ShmBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  const at::Tensor input = only(inputs, "all_gather");
  if (outputs.size() != 1) throw InvalidArgument("all_gather: one list of outputs is needed");
  check_list(outputs[0], size_, input, "all_gather");
  return start(all_gather_request(outputs[0], input), OpType::ALLGATHER, outputs[0], options.timeout, inputs);
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  return start(all_gather_request(output, input), OpType::_ALLGATHER_BASE, {output}, options.timeout, input);
}

ShmBackend::WorkPtr ShmBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  // outputs[rank][tensor]
  Tensors flat;
  if (outputs.size() != static_cast<std::size_t>(size_))
    throw InvalidArgument(fmt::format("all_gather_coalesced: outputs for {} ranks, not {}", size_, outputs.size()));
  std::vector<Tensors> of_tensor(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], "all_gather_coalesced");
    for (const Tensors& list : outputs) {
      if (list.size() != inputs.size())
        throw InvalidArgument("all_gather_coalesced: every rank's list needs an output for each input");
      of_tensor[i].push_back(list[i]);
      flat.push_back(list[i]);
    }
    check_list(of_tensor[i], size_, inputs[i], "all_gather_coalesced");
  }
  std::vector<Request> requests;
  for (std::size_t i = 0; i < inputs.size(); ++i) requests.push_back(all_gather_request(of_tensor[i], inputs[i]));
  return start(std::move(requests), OpType::ALLGATHER_COALESCED, flat, options.timeout, inputs);
}

ShmBackend::WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& options) {
  if (outputs.size() != inputs.size())
    throw InvalidArgument("all_gather_into_tensor_coalesced: as many outputs as inputs are needed");
  std::vector<Request> requests;
  for (std::size_t i = 0; i < inputs.size(); ++i) requests.push_back(all_gather_request(outputs[i], inputs[i]));
  return start(std::move(requests), OpType::COALESCED, outputs, options.timeout, inputs);
}

ShmBackend::WorkPtr ShmBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const at::Tensor input = only(inputs, "gather");
  check_root(options.rootRank, size_, "gather");
  const bool is_root = options.rootRank == rank_;
  if (outputs.size() != (is_root ? 1u : 0u))
    throw InvalidArgument(is_root ? "gather: the root needs one list of outputs" : "gather: only the root has outputs");
  if (is_root) check_list(outputs[0], size_, input, "gather");
  const at::Tensor dense = input.contiguous();
  Outputs results("gather");
  Request request{.kind = CollectiveKind::kGather,
                  .dtype = data_type(input),
                  .root = static_cast<int>(options.rootRank),
                  .input = dense.data_ptr(),
                  .numel = element_count(input)};
  Tensors targets = is_root ? outputs[0] : Tensors{};
  for (const at::Tensor& target : targets) request.outputs.push_back(results.add(target).data_ptr());
  results.attach_to(request, {dense});
  return start(std::move(request), OpType::GATHER, std::move(targets), options.timeout, inputs);
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& options) {
  const at::Tensor output = only(outputs, "scatter");
  check_root(options.rootRank, size_, "scatter");
  const bool is_root = options.rootRank == rank_;
  if (inputs.size() != (is_root ? 1u : 0u))
    throw InvalidArgument(is_root ? "scatter: the root needs one list of inputs" : "scatter: only the root has inputs");
  if (is_root) check_list(inputs[0], size_, output, "scatter");
  Outputs results("scatter");
  Request request{.kind = CollectiveKind::kScatter,
                  .dtype = data_type(output),
                  .root = static_cast<int>(options.rootRank),
                  .output = results.add(output).data_ptr(),
                  .numel = element_count(output)};
  Tensors dense;
  for (const at::Tensor& input : is_root ? inputs[0] : Tensors{}) {
    dense.push_back(input.contiguous());
    request.inputs.push_back(dense.back().data_ptr());
  }
  results.attach_to(request, std::move(dense));
  return start(std::move(request), OpType::SCATTER, {output}, options.timeout, is_root ? inputs[0] : Tensors());
}

Request ShmBackend::reduce_scatter_request(const at::Tensor& output, const Tensors& inputs,
                                           const c10d::ReduceOp& op) const {
  Outputs results("reduce_scatter");
  Request request{.kind = CollectiveKind::kReduceScatter,
                  .dtype = data_type(output),
                  .op = reduction(op, output, "reduce_scatter"),
                  .output = results.add(output).data_ptr(),
                  .numel = element_count(output)};
  Tensors dense;
  for (const at::Tensor& input : inputs) {
    dense.push_back(contribution(op, input));
    request.inputs.push_back(dense.back().data_ptr());
  }
  results.attach_to(request, std::move(dense));
  return request;
}

Request ShmBackend::reduce_scatter_request(const at::Tensor& output, const at::Tensor& input,
                                           const c10d::ReduceOp& op) const {
  check_stacked(input, output, "reduce_scatter");
  const at::Tensor dense = contribution(op, input);
  Outputs results("reduce_scatter");
  Request request = dense_reduce_scatter_request(results.add(output), dense, op);
  results.attach_to(request, {dense});
  return request;
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const at::Tensor output = only(outputs, "reduce_scatter");
  if (inputs.size() != 1) throw InvalidArgument("reduce_scatter: one list of inputs is needed");
  check_list(inputs[0], size_, output, "reduce_scatter");
  return start(reduce_scatter_request(output, inputs[0], options.reduceOp), OpType::REDUCE_SCATTER, {output},
               options.timeout, inputs[0]);
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  return start(reduce_scatter_request(output, input, options.reduceOp), OpType::_REDUCE_SCATTER_BASE, {output},
               options.timeout, input);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& options) {
  if (outputs.size() != inputs.size())
    throw InvalidArgument("reduce_scatter_tensor_coalesced: as many outputs as inputs are needed");
  std::vector<Request> requests;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    requests.push_back(reduce_scatter_request(outputs[i], inputs[i], options.reduceOp));
  return start(std::move(requests), OpType::COALESCED, outputs, options.timeout, inputs);
}

Request ShmBackend::all_to_all_request(const Tensors& outputs, const Tensors& inputs) const {
  if (inputs.size() != static_cast<std::size_t>(size_) || outputs.size() != static_cast<std::size_t>(size_))
    throw InvalidArgument(
        fmt::format("all_to_all: {} inputs and {} outputs for {} ranks", inputs.size(), outputs.size(), size_));
  Request request{.kind = CollectiveKind::kAllToAll, .dtype = data_type(inputs[0])};
  Outputs targets("all_to_all");
  Tensors dense;
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    check_tensor(inputs[r], "all_to_all");
    check_tensor(outputs[r], "all_to_all");
    if (inputs[r].scalar_type() != inputs[0].scalar_type() || outputs[r].scalar_type() != inputs[0].scalar_type())
      throw InvalidArgument("all_to_all: all tensors must have one type");
    dense.push_back(inputs[r].contiguous());
    request.inputs.push_back(dense.back().data_ptr());
    request.outputs.push_back(targets.add(outputs[r]).data_ptr());
    request.send_numel.push_back(element_count(inputs[r]));
    request.receive_numel.push_back(element_count(outputs[r]));
  }
  const auto own = static_cast<std::size_t>(rank_);
  if (request.send_numel[own] != request.receive_numel[own])
    throw InvalidArgument(fmt::format("all_to_all: rank {} keeps {} elements for itself, but has room for {}", rank_,
                                      request.send_numel[own], request.receive_numel[own]));
  request.numel = *std::max_element(request.send_numel.begin(), request.send_numel.end());
  targets.attach_to(request, std::move(dense));
  return request;
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return start(all_to_all_request(outputs, inputs), OpType::ALLTOALL, outputs, options.timeout, inputs);
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  const auto split = [this](const at::Tensor& tensor, std::vector<int64_t> sizes, const char* name) {
    check_tensor(tensor, "all_to_all");
    if (tensor.dim() == 0) throw InvalidArgument("all_to_all: a scalar cannot be split");
    if (!tensor.is_contiguous()) throw InvalidArgument(fmt::format("all_to_all: the {} must be contiguous", name));
    const int64_t length = tensor.size(0);
    if (sizes.empty()) {
      if (length % size_ != 0)
        throw InvalidArgument(
            fmt::format("all_to_all: {} rows of the {} do not divide evenly over {} ranks", length, name, size_));
      sizes.assign(static_cast<std::size_t>(size_), length / size_);
    }
    const bool fits = sizes.size() == static_cast<std::size_t>(size_) &&
                      std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size >= 0; }) &&
                      std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == length;
    if (!fits)
      throw InvalidArgument(
          fmt::format("all_to_all: the {} splits must be {} numbers that add up to its {} rows", name, size_, length));
    return tensor.detach().split_with_sizes(sizes);
  };
  return start(all_to_all_request(split(output, output_splits, "output"), split(input, input_splits, "input")),
               OpType::ALLTOALL_BASE, {output}, options.timeout, input);
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return start(Request{.kind = CollectiveKind::kBarrier}, OpType::BARRIER, {}, options.timeout, {});
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  start(Request{.kind = CollectiveKind::kBarrier, .monitored = true, .names_all = wait_all_ranks}, OpType::BARRIER, {},
        options.timeout, {})
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
                                         bounded(timeout));
}

c10::intrusive_ptr<c10d::Backend> create_shm_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                     int world_size, std::chrono::milliseconds timeout) {
  return create_shm_part(store, rank, world_size, timeout);
}

Backend::Ptr<Backend> ShmBackend::subgroup(const Ptr<c10d::Store>& store, const std::vector<int>& /*ranks*/,
                                           const LaunchEnvironment& part) {
  return create_shm_part(store, part.rank, part.world_size, timeout_);
}

}  // namespace ddpkit
