#include <ddpkit/comm/process_group.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <string_view>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddpkit/comm/error.h>
#include <ddpkit/comm/shm_backend.h>

#include "comm/backends.h"
#include "comm/registered_memory.h"
#include "comm/staged_backend.h"

namespace ddpkit {

Work::Work() = default;
Work::Work(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
Work::~Work() = default;
Work::Work(const Work&) = default;
Work::Work(Work&&) noexcept = default;
Work& Work::operator=(const Work&) = default;
Work& Work::operator=(Work&&) noexcept = default;

void Work::wait() {
  if (work_) work_->wait();
}

bool Work::is_completed() { return !work_ || work_->isCompleted(); }

struct ProcessGroup::State {
  c10::intrusive_ptr<c10d::Backend> backend;
  c10::intrusive_ptr<c10d::Store> store;
  at::Device device;
  LaunchEnvironment environment;
  std::string backend_name;
  std::chrono::milliseconds timeout = kBackendDefaultTimeout;  ///< Of groups split off.
  std::atomic<int> splits = 0;
  OwnBackend* own = nullptr;  ///< The backend, where it is ddpkit's, as the next.
  AbortableBackend* abortable = nullptr;
};

namespace {

c10d::ReduceOp c10d_op(ReduceOp op) { return static_cast<c10d::ReduceOp::RedOpType>(op); }

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

struct BackendKind {
  std::string_view name;
  BackendPtr (*create)(const StorePtr& store, const LaunchEnvironment& environment, at::Device device,
                       std::chrono::milliseconds timeout);
};

constexpr BackendKind kBackends[] = {
    {"shm",
     [](const StorePtr& store, const LaunchEnvironment& environment, at::Device device,
        std::chrono::milliseconds timeout) {
       if (device.is_cpu()) return create_shm_backend(store, environment.rank, environment.world_size, timeout);
       return create_staged_shm_backend(store, environment.rank, environment.world_size, device, timeout);
     }},
    {"gloo", [](const StorePtr& store, const LaunchEnvironment& environment, at::Device,
                std::chrono::milliseconds timeout) { return create_gloo_backend(store, environment, timeout); }},
    {"nccl", create_nccl_backend},
};

/// Null for a name that is no backend's.
const BackendKind* find_backend(std::string_view name) {
  const auto* found = std::ranges::find(kBackends, name, &BackendKind::name);
  return found == std::end(kBackends) ? nullptr : found;
}

/// `source` is where the name comes from, for the message.
const BackendKind& backend_named(std::string_view name, const char* source) {
  if (const BackendKind* kind = find_backend(name)) return *kind;
  std::vector<std::string_view> names;
  for (const BackendKind& kind : kBackends) names.push_back(kind.name);
  throw InvalidArgument(fmt::format("{} \"{}\" is not one of {}", source, name, fmt::join(names, ", ")));
}

}  // namespace

ProcessGroup::ProcessGroup(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store,
                           at::Device device, const LaunchEnvironment& environment)
    : state_(new State{.backend = std::move(backend),
                       .store = std::move(store),
                       .device = device,
                       .environment = environment,
                       .backend_name = {}}) {
  if (!state_->backend) throw InvalidArgument("a process group needs a backend");
  state_->backend_name = state_->backend->getBackendName();
  state_->own = dynamic_cast<OwnBackend*>(state_->backend.get());
  state_->abortable = dynamic_cast<AbortableBackend*>(state_->backend.get());
  if (find_backend(state_->backend_name)) state_->timeout = state_->backend->getBackendOptions()->timeout;
  state_->environment.rank = state_->backend->getRank();
  state_->environment.world_size = state_->backend->getSize();
}

int ProcessGroup::rank() const noexcept { return state_->environment.rank; }
int ProcessGroup::world_size() const noexcept { return state_->environment.world_size; }
int ProcessGroup::local_rank() const noexcept { return state_->environment.local_rank; }
int ProcessGroup::local_world_size() const noexcept { return state_->environment.local_world_size; }
at::Device ProcessGroup::device() const noexcept { return state_->device; }
const std::string& ProcessGroup::backend_name() const noexcept { return state_->backend_name; }
const c10::intrusive_ptr<c10d::Backend>& ProcessGroup::backend() const noexcept { return state_->backend; }
const c10::intrusive_ptr<c10d::Store>& ProcessGroup::store() const noexcept { return state_->store; }

Work ProcessGroup::all_reduce_async(const at::Tensor& tensor, ReduceOp op) const {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d_op(op);
  return Work(state_->backend->allreduce(tensors, options));
}

Work ProcessGroup::broadcast_async(const at::Tensor& tensor, int root) const {
  std::vector<at::Tensor> tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return Work(state_->backend->broadcast(tensors, options));
}

void ProcessGroup::all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  if (state_->own) return state_->own->all_reduce_now(tensor, c10d_op(op));
  all_reduce_async(tensor, op).wait();
}

void ProcessGroup::broadcast(const at::Tensor& tensor, int root) const { broadcast_async(tensor, root).wait(); }

namespace {

std::vector<std::int64_t> stacked_sizes(int ranks, const at::Tensor& tensor) {
  std::vector<std::int64_t> sizes{ranks};
  sizes.insert(sizes.end(), tensor.sizes().begin(), tensor.sizes().end());
  return sizes;
}

/// Flat: backends differ in which shapes they take, not in what they do.
at::Tensor flat(const at::Tensor& tensor) { return tensor.detach().view({-1}); }

}  // namespace

Work ProcessGroup::all_gather_into_async(const at::Tensor& output, const at::Tensor& tensor) const {
  at::Tensor flat_output = flat(output);
  at::Tensor flat_input = flat(tensor.contiguous());
  return Work(state_->backend->_allgather_base(flat_output, flat_input, c10d::AllgatherOptions()));
}

void ProcessGroup::all_gather_into(const at::Tensor& output, const at::Tensor& tensor) const {
  all_gather_into_async(output, tensor).wait();
}

at::Tensor ProcessGroup::all_gather(const at::Tensor& tensor) const {
  at::Tensor output = at::empty(stacked_sizes(world_size(), tensor), tensor.options().requires_grad(false));
  all_gather_into(output, tensor);
  return output;
}

void ProcessGroup::reduce(const at::Tensor& tensor, int root, ReduceOp op) const {
  std::vector<at::Tensor> tensors{tensor};
  c10d::ReduceOptions options;
  options.reduceOp = c10d_op(op);
  options.rootRank = root;
  Work(state_->backend->reduce(tensors, options)).wait();
}

Work ProcessGroup::reduce_scatter_async(const at::Tensor& output, const at::Tensor& input, ReduceOp op) const {
  at::Tensor flat_output = flat(output);
  at::Tensor flat_input = flat(input);
  c10d::ReduceScatterOptions options;
  options.reduceOp = c10d_op(op);
  return Work(state_->backend->_reduce_scatter_base(flat_output, flat_input, options));
}

void ProcessGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) const {
  reduce_scatter_async(output, input, op).wait();
}

at::Tensor ProcessGroup::gather(const at::Tensor& tensor, int root) const {
  std::vector<at::Tensor> inputs{tensor.detach().contiguous()};
  std::vector<std::vector<at::Tensor>> outputs;
  at::Tensor stacked;
  if (rank() == root) {
    stacked = at::empty(stacked_sizes(world_size(), tensor), tensor.options().requires_grad(false));
    outputs.push_back(stacked.unbind(0));
  }
  c10d::GatherOptions options;
  options.rootRank = root;
  Work(state_->backend->gather(outputs, inputs, options)).wait();
  return stacked;
}

void ProcessGroup::scatter(const at::Tensor& output, const at::Tensor& input, int root) const {
  std::vector<at::Tensor> outputs{output};
  std::vector<std::vector<at::Tensor>> inputs;
  if (rank() == root) inputs.push_back(input.detach().contiguous().unbind(0));
  c10d::ScatterOptions options;
  options.rootRank = root;
  Work(state_->backend->scatter(outputs, inputs, options)).wait();
}

void ProcessGroup::all_to_all(const at::Tensor& output, const at::Tensor& input,
                              std::vector<std::int64_t> output_splits, std::vector<std::int64_t> input_splits) const {
  at::Tensor target = output.detach();
  at::Tensor source = input.detach().contiguous();
  Work(state_->backend->alltoall_base(target, source, output_splits, input_splits, c10d::AllToAllOptions())).wait();
}

Work ProcessGroup::send_async(const at::Tensor& tensor, int destination, int tag) const {
  std::vector<at::Tensor> tensors{tensor};
  return Work(state_->backend->send(tensors, destination, tag));
}

Work ProcessGroup::recv_async(const at::Tensor& tensor, int source, int tag) const {
  std::vector<at::Tensor> tensors{tensor};
  return Work(state_->backend->recv(tensors, source, tag));
}

void ProcessGroup::send(const at::Tensor& tensor, int destination, int tag) const {
  send_async(tensor, destination, tag).wait();
}

void ProcessGroup::recv(const at::Tensor& tensor, int source, int tag) const { recv_async(tensor, source, tag).wait(); }

int ProcessGroup::recv_any(const at::Tensor& tensor, int tag) const {
  std::vector<at::Tensor> tensors{tensor};
  const auto work = state_->backend->recvAnysource(tensors, tag);
  work->wait();
  return work->sourceRank();
}

std::optional<ProcessGroup> ProcessGroup::split(const std::vector<int>& ranks) const {
  for (const int r : ranks) {
    if (r < 0 || r >= world_size() || std::count(ranks.begin(), ranks.end(), r) != 1)
      throw InvalidArgument(fmt::format(
          "split: the ranks must be different numbers between 0 and {}, but {} is among them", world_size() - 1, r));
  }
  if (ranks.empty()) throw InvalidArgument("split: a group needs at least one rank");
  // All ranks count splits alike, so that each group meets under a key of its own.
  const int number = state_->splits++;
  const auto own = std::find(ranks.begin(), ranks.end(), rank());
  if (own == ranks.end()) return std::nullopt;
  auto store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("split-{}-{}", number, ranks.front()), state_->store);
  LaunchEnvironment environment = state_->environment;
  environment.rank = static_cast<int>(own - ranks.begin());
  environment.world_size = static_cast<int>(ranks.size());
  // Of the ranks on this host only their number in the whole job is known; a group cannot have more than it has ranks.
  if (state_->environment.local_world_size == state_->environment.world_size) {
    environment.local_world_size = environment.world_size;
    environment.local_rank = environment.rank;
  }
  return ProcessGroup(
      backend_named(backend_name(), "the backend").create(store, environment, device(), state_->timeout), store,
      device(), environment);
}

std::vector<std::string> ProcessGroup::all_gather_bytes(std::string_view bytes) const {
  const auto options = at::TensorOptions(at::kByte);
  // Where the backend takes the host's tensors, what goes wrong comes out at once.
  const at::Device where = state_->abortable ? at::kCPU : device();
  at::Tensor length = at::empty({1}, options.dtype(at::kLong));
  length.data_ptr<std::int64_t>()[0] = static_cast<std::int64_t>(bytes.size());
  const at::Tensor lengths = all_gather(length.to(where)).cpu();
  const auto* length_of = lengths.const_data_ptr<std::int64_t>();
  std::int64_t longest = 1;
  for (int r = 0; r < world_size(); ++r) longest = std::max(longest, length_of[r]);
  at::Tensor padded = at::zeros({longest}, options);
  std::copy(bytes.begin(), bytes.end(), padded.data_ptr<std::uint8_t>());
  const at::Tensor all = all_gather(padded.to(where)).cpu();
  std::vector<std::string> texts;
  for (int r = 0; r < world_size(); ++r) {
    const auto* start = all.const_data_ptr<std::uint8_t>() + r * longest;
    texts.emplace_back(start, start + length_of[r]);
  }
  return texts;
}

void ProcessGroup::barrier() const {
  if (state_->own) return state_->own->barrier_now();
  c10d::BarrierOptions options;
  if (device().is_cuda()) options.device = device();
  Work(state_->backend->barrier(options)).wait();
}

at::Tensor ProcessGroup::allocate(at::IntArrayRef sizes, at::ScalarType dtype) const {
  if (state_->own) return state_->own->allocate(sizes, dtype);
  const auto options = at::TensorOptions(dtype).device(device());
  if (device().is_cuda() && c10::multiply_integers(sizes) != 0) {
    if (const at::Tensor registered = allocate_registered(*state_->backend, sizes, options); registered.defined())
      return registered;
  }
  return at::empty(sizes, options);
}

void ProcessGroup::abort(const std::string& reason) const noexcept {
  if (state_->abortable) state_->abortable->abort_group(reason);
}

namespace {

const BackendKind& choose_backend(const InitOptions& options, const LaunchEnvironment& environment) {
  std::string backend = options.backend;
  const char* from_environment = std::getenv("DDPKIT_BACKEND");
  const bool named_here = !backend.empty();
  if (!named_here && from_environment) backend = from_environment;
  if (backend.empty()) {
    const bool gpu = options.device ? options.device->is_cuda() : cuda_device_count() > 0;
    const bool one_host = environment.local_world_size == environment.world_size;
    backend = gpu ? "nccl" : one_host ? "shm" : "gloo";
  }
  return backend_named(backend, named_here ? "the backend" : "DDPKIT_BACKEND");
}

at::Device choose_device(const InitOptions& options, std::string_view backend, const LaunchEnvironment& environment) {
  if (options.device) return *options.device;
  if (backend != "nccl") return at::kCPU;
  const int devices = cuda_device_count();
  if (devices > 0 && environment.local_rank >= devices)
    throw InvalidArgument(fmt::format(
        "rank {} is number {} on this host, which has {} GPU{}: start at most one rank a GPU, or train on the "
        "CPU with --backend shm",
        environment.rank, environment.local_rank, devices, devices == 1 ? "" : "s"));
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(environment.local_rank));
}

}  // namespace

ProcessGroup init_process_group(const InitOptions& options) {
  const LaunchEnvironment environment = options.environment ? *options.environment : read_launch_environment();
  const BackendKind& backend_kind = choose_backend(options, environment);
  const at::Device device = choose_device(options, backend_kind.name, environment);
  if (device.is_cuda() && cuda_device_count() > 0) set_cuda_device(device);
  auto store = connect_store(environment, options.timeout);
  auto backend = backend_kind.create(store, environment, device, options.timeout);
  return ProcessGroup(std::move(backend), std::move(store), device, environment);
}

}  // namespace ddpkit
