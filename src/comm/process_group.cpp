#include <ddpkit/comm/process_group.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string_view>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddpkit/error.h>

#include "comm/backends.h"
#include "comm/backends/guarded_backend.h"
#include "comm/device_index.h"
#include "comm/roll_call.h"
#include "comm/trace/recorder.h"

namespace ddpkit {

Work::Work() = default;
Work::Work(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
Work::Work(c10::intrusive_ptr<c10d::Work> work, std::uint64_t record) : work_(std::move(work)), record_(record) {}
Work::~Work() = default;
Work::Work(const Work&) = default;
Work::Work(Work&&) noexcept = default;
Work& Work::operator=(const Work&) = default;
Work& Work::operator=(Work&&) noexcept = default;

void Work::wait() {
  if (!work_) return;
  if (record_ == kNoRecord) {
    work_->wait();
    return;
  }
  flight::Recorder& recorder = flight::Recorder::of_process();
  try {
    work_->wait();
  } catch (const std::exception& error) {
    // c10d's backends report a timeout only in the text of the error.
    const std::string_view text = error.what();
    const bool late =
        text.find("imed out") != text.npos || text.find("timeout") != text.npos || text.find("Timeout") != text.npos;
    recorder.fail(late ? flight::Failure::kTimeout : flight::Failure::kPeerLost, std::nullopt);
    throw;
  }
  recorder.finish(record_);
}

bool Work::is_completed() { return !work_ || work_->isCompleted(); }

struct ProcessGroup::State {
  /// A child made by fork() must not delete the state: it would wait for threads that it does not have, and the end of
  /// the group would be reported to the other ranks.
  struct Deleter {
    void operator()(State* state) const {
      if (::getpid() != state->process) return;
      flight::Recorder& recorder = flight::Recorder::of_process();
      if (state->records && recorder.is_world(state->group_number)) recorder.leave();
      delete state;
    }
  };

  c10::intrusive_ptr<c10d::Backend> backend;
  c10::intrusive_ptr<c10d::Store> store;
  at::Device device;
  LaunchEnvironment environment;
  std::string backend_name;
  std::chrono::milliseconds timeout = kBackendDefaultTimeout;  ///< For groups made by split().
  std::atomic<int> splits = 0;
  OwnBackend* own = nullptr;  ///< The backend, if it has this interface; the same for abortable and guarded.
  AbortableBackend* abortable = nullptr;
  GuardedBackend* guarded = nullptr;
  bool one_device = false;         ///< The backend supports only tensors on `device`.
  bool records = false;            ///< Calls are recorded here: the backend does not use the flight recorder.
  std::uint32_t group_number = 0;  ///< For the flight recorder, if `records`; the same for sequence.
  std::atomic<std::uint64_t> sequence = 0;
  pid_t process = ::getpid();

  /// The errors of c10d's backends do not name the device.
  void require_device(flight::Call call, const at::Tensor& tensor) const {
    if (!one_device || !tensor.defined()) return;
    const at::Device its = tensor.device();
    if (its.type() == device.type() && (its.is_cpu() || its.index() == device.index() || !device.has_index())) return;
    throw InvalidArgument(fmt::format("{}: the tensor is on {}, but this group's {} works on {}: move the tensor there",
                                      flight::name_of(call), its.str(), backend_name, device.str()));
  }

  /// NCCL and gloo would copy the bytes of one type to a tensor of another type.
  static void require_one_type(flight::Call call, const at::Tensor& output, const at::Tensor& input) {
    if (!output.defined() || !input.defined() || output.scalar_type() == input.scalar_type()) return;
    throw InvalidArgument(fmt::format("{}: the input is of type {}, but the output of type {}; convert one of them",
                                      flight::name_of(call), c10::toString(input.scalar_type()),
                                      c10::toString(output.scalar_type())));
  }

  /// Calls `start` and records the call with the size of `tensor`.
  template <class Start>
  Work recorded(flight::Call call, const at::Tensor& tensor, const Start& start) {
    require_device(call, tensor);
    const std::uint64_t record = records ? flight::Recorder::of_process().start(
                                               call, sequence++, tensor.defined() ? tensor.nbytes() : 0, group_number)
                                         : Work::kNoRecord;
    if (!guarded) return {start(), record};
    guarded->guard().throw_failure();
    const bool is_message = call == flight::Call::kSend || call == flight::Call::kReceive;
    // On a device, only the guard knows when the call ends.
    return {guarded->guarded(start(), backend, record, is_message), guarded->hides_aborts() ? Work::kNoRecord : record};
  }
};

namespace {

c10d::ReduceOp c10d_op(ReduceOp op) { return static_cast<c10d::ReduceOp::RedOpType>(op); }

}  // namespace

ProcessGroup::ProcessGroup(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store,
                           at::Device device, const LaunchEnvironment& environment)
    : state_(new State{.backend = std::move(backend),
                       .store = std::move(store),
                       .device = with_index(device, environment.local_rank),
                       .environment = environment,
                       .backend_name = {}},
             State::Deleter()) {
  if (!state_->backend) throw InvalidArgument("a process group needs a backend");
  state_->backend_name = state_->backend->getBackendName();
  state_->own = dynamic_cast<OwnBackend*>(state_->backend.get());
  state_->abortable = dynamic_cast<AbortableBackend*>(state_->backend.get());
  state_->guarded = dynamic_cast<GuardedBackend*>(state_->backend.get());
  if (state_->guarded) {
    state_->timeout = state_->guarded->guard().timeout();
  } else if (find_backend(state_->backend_name)) {
    state_->timeout = state_->backend->getBackendOptions()->timeout;
  }
  state_->one_device = state_->backend_name == "nccl" || state_->backend_name == "gloo";
  state_->records = (!state_->abortable || state_->guarded) && state_->backend->getSize() > 1;
  if (state_->records) state_->group_number = flight::Recorder::of_process().new_group();
  if (state_->records && state_->guarded) state_->guarded->guard().set_group(state_->group_number);
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
  return state_->recorded(flight::Call::kAllReduce, tensor,
                          [&] { return state_->backend->allreduce(tensors, options); });
}

Work ProcessGroup::broadcast_async(const at::Tensor& tensor, int root) const {
  std::vector<at::Tensor> tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return state_->recorded(flight::Call::kBroadcast, tensor,
                          [&] { return state_->backend->broadcast(tensors, options); });
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

/// Returns a flat view: the backends support different shapes.
at::Tensor flat(const at::Tensor& tensor) { return tensor.detach().view({-1}); }

}  // namespace

Work ProcessGroup::all_gather_into_async(const at::Tensor& output, const at::Tensor& tensor) const {
  state_->require_device(flight::Call::kAllGather, output);
  State::require_one_type(flight::Call::kAllGather, output, tensor);
  at::Tensor flat_output = flat(output);
  at::Tensor flat_input = flat(tensor.contiguous());
  return state_->recorded(flight::Call::kAllGather, tensor, [&] {
    return state_->backend->_allgather_base(flat_output, flat_input, c10d::AllgatherOptions());
  });
}

void ProcessGroup::all_gather_into(const at::Tensor& output, const at::Tensor& tensor) const {
  State::require_one_type(flight::Call::kAllGather, output, tensor);
  if (state_->own) return state_->own->all_gather_now(output, tensor);
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
  state_->recorded(flight::Call::kReduce, tensor, [&] { return state_->backend->reduce(tensors, options); }).wait();
}

Work ProcessGroup::reduce_scatter_async(const at::Tensor& output, const at::Tensor& input, ReduceOp op) const {
  state_->require_device(flight::Call::kReduceScatter, output);
  State::require_one_type(flight::Call::kReduceScatter, output, input);
  at::Tensor flat_output = flat(output);
  at::Tensor flat_input = flat(input);
  c10d::ReduceScatterOptions options;
  options.reduceOp = c10d_op(op);
  return state_->recorded(flight::Call::kReduceScatter, input,
                          [&] { return state_->backend->_reduce_scatter_base(flat_output, flat_input, options); });
}

void ProcessGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) const {
  State::require_one_type(flight::Call::kReduceScatter, output, input);
  if (state_->own) return state_->own->reduce_scatter_now(output, input, c10d_op(op));
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
  state_->recorded(flight::Call::kGather, tensor, [&] { return state_->backend->gather(outputs, inputs, options); })
      .wait();
  return stacked;
}

void ProcessGroup::scatter(const at::Tensor& output, const at::Tensor& input, int root) const {
  std::vector<at::Tensor> outputs{output};
  std::vector<std::vector<at::Tensor>> inputs;
  if (rank() == root) State::require_one_type(flight::Call::kScatter, output, input);
  if (rank() == root) inputs.push_back(input.detach().contiguous().unbind(0));
  c10d::ScatterOptions options;
  options.rootRank = root;
  state_->recorded(flight::Call::kScatter, output, [&] { return state_->backend->scatter(outputs, inputs, options); })
      .wait();
}

void ProcessGroup::all_to_all(const at::Tensor& output, const at::Tensor& input,
                              std::vector<std::int64_t> output_splits, std::vector<std::int64_t> input_splits) const {
  state_->require_device(flight::Call::kAllToAll, output);
  State::require_one_type(flight::Call::kAllToAll, output, input);
  at::Tensor target = output.detach();
  at::Tensor source = input.detach().contiguous();
  state_
      ->recorded(flight::Call::kAllToAll, input,
                 [&] {
                   return state_->backend->alltoall_base(target, source, output_splits, input_splits,
                                                         c10d::AllToAllOptions());
                 })
      .wait();
}

Work ProcessGroup::send_async(const at::Tensor& tensor, int destination, int tag) const {
  std::vector<at::Tensor> tensors{tensor};
  return state_->recorded(flight::Call::kSend, tensor,
                          [&] { return state_->backend->send(tensors, destination, tag); });
}

Work ProcessGroup::recv_async(const at::Tensor& tensor, int source, int tag) const {
  std::vector<at::Tensor> tensors{tensor};
  return state_->recorded(flight::Call::kReceive, tensor, [&] { return state_->backend->recv(tensors, source, tag); });
}

void ProcessGroup::send(const at::Tensor& tensor, int destination, int tag) const {
  send_async(tensor, destination, tag).wait();
}

void ProcessGroup::recv(const at::Tensor& tensor, int source, int tag) const { recv_async(tensor, source, tag).wait(); }

int ProcessGroup::recv_any(const at::Tensor& tensor, int tag) const {
  std::vector<at::Tensor> tensors{tensor};
  Work work =
      state_->recorded(flight::Call::kReceive, tensor, [&] { return state_->backend->recvAnysource(tensors, tag); });
  work.wait();
  return work.c10d_work()->sourceRank();
}

std::optional<ProcessGroup> ProcessGroup::split(const std::vector<int>& ranks) const {
  for (const int r : ranks) {
    if (r < 0 || r >= world_size() || std::count(ranks.begin(), ranks.end(), r) != 1)
      throw InvalidArgument(fmt::format(
          "split: the ranks must be different numbers between 0 and {}, but {} is among them", world_size() - 1, r));
  }
  if (ranks.empty()) throw InvalidArgument("split: a group needs at least one rank");
  // All ranks count their splits, so the prefix of each group's store keys is unique.
  const int number = state_->splits++;
  const auto own = std::find(ranks.begin(), ranks.end(), rank());
  if (own == ranks.end()) return std::nullopt;
  auto store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("split-{}-{}", number, ranks.front()), state_->store);
  LaunchEnvironment environment = state_->environment;
  environment.rank = static_cast<int>(own - ranks.begin());
  environment.world_size = static_cast<int>(ranks.size());
  if (state_->environment.local_world_size == state_->environment.world_size) {
    environment.local_world_size = environment.world_size;
    environment.local_rank = environment.rank;
  } else {
    find_place_on_host(*store, environment);
  }
  // A subset may have different numbers of ranks per host.
  const std::string kind = backend_name() == "hierarchical" ? "gloo" : backend_name();
  return ProcessGroup(backend_named(kind, "the backend").create(store, environment, device(), state_->timeout), store,
                      device(), environment);
}

std::vector<std::string> ProcessGroup::all_gather_bytes(std::string_view bytes) const {
  const auto options = at::TensorOptions(at::kByte);
  // With a backend for CPU tensors, errors are thrown immediately.
  const at::Device where = state_->abortable && !state_->guarded ? at::kCPU : device();
  at::Tensor length = at::empty({1}, options.dtype(at::kLong));
  length.data_ptr<std::int64_t>()[0] = static_cast<std::int64_t>(bytes.size());
  const at::Tensor lengths = all_gather(length.to(where)).cpu();
  check();
  const auto* length_of = lengths.const_data_ptr<std::int64_t>();
  std::int64_t longest = 1;
  for (int r = 0; r < world_size(); ++r) longest = std::max(longest, length_of[r]);
  at::Tensor padded = at::zeros({longest}, options);
  std::copy(bytes.begin(), bytes.end(), padded.data_ptr<std::uint8_t>());
  const at::Tensor all = all_gather(padded.to(where)).cpu();
  check();
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
  state_->recorded(flight::Call::kBarrier, at::Tensor(), [&] { return state_->backend->barrier(options); }).wait();
}

at::Tensor ProcessGroup::allocate(at::IntArrayRef sizes, at::ScalarType dtype) const {
  if (state_->own) return state_->own->allocate(sizes, dtype);
  const auto options = at::TensorOptions(dtype).device(device());
  const std::int64_t numel = c10::multiply_integers(sizes);
  if (device().is_cuda() && numel != 0 && state_->backend->supportsTensorAlloc(device().index()))
    return state_->backend->allocateTensor(numel, options).view(sizes);
  return at::empty(sizes, options);
}

void ProcessGroup::check() const {
  if (state_->guarded) state_->guarded->guard().throw_failure();
}

void ProcessGroup::abort(const std::string& reason) const noexcept {
  if (state_->abortable) state_->abortable->abort_group(reason);
}

}  // namespace ddpkit
