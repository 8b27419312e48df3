#include <ddpkit/comm/process_group.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddpkit/error.h>

#include "comm/backend.h"
#include "comm/device_index.h"
#include "comm/process_group_state.h"
#include "comm/roll_call.h"
#include "comm/timeout.h"

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

const c10::intrusive_ptr<Backend>& Backend::of(const ProcessGroup& group) noexcept { return group.state_->backend; }

ProcessGroup Backend::on_hosts(const ProcessGroup& group) {
  ProcessGroup::State& state = *group.state_;
  Backend& backend = state.open();
  auto store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("hosts-{}", state.splits++), state.store);
  const LaunchEnvironment& environment = state.environment;
  const bool one_host = environment.local_world_size == environment.world_size;
  const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(backend.getBackendOptions()->timeout);
  ProcessGroup hosts(create_backend(one_host ? "shm" : "gloo", store, environment, at::kCPU, timeout), store, at::kCPU,
                     environment);
  state.add_part(hosts.state_);
  return hosts;
}

namespace {

c10d::ReduceOp c10d_op(ReduceOp op) { return static_cast<c10d::ReduceOp::RedOpType>(op); }

/// NCCL and gloo would copy the bytes of one type to a tensor of another type.
void require_one_type(const char* call, const at::Tensor& output, const at::Tensor& input) {
  if (!output.defined() || !input.defined() || output.scalar_type() == input.scalar_type()) return;
  throw InvalidArgument(fmt::format("{}: the input is of type {}, but the output of type {}; convert one of them", call,
                                    c10::toString(input.scalar_type()), c10::toString(output.scalar_type())));
}

}  // namespace

ProcessGroup::ProcessGroup(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store,
                           at::Device device, const LaunchEnvironment& environment) {
  if (!backend) throw InvalidArgument("a process group needs a backend");
  device = with_index(device, environment.local_rank);
  const auto adopted = Backend::adopt(std::move(backend), device);
  state_.reset(new State{.backend = adopted,
                         .native = adopted->native(),
                         .store = std::move(store),
                         .device = device,
                         .environment = environment,
                         .backend_name = adopted->getBackendName()},
               State::Deleter());
  state_->environment.rank = adopted->getRank();
  state_->environment.world_size = adopted->getSize();
}

int ProcessGroup::rank() const noexcept { return state_->environment.rank; }
int ProcessGroup::world_size() const noexcept { return state_->environment.world_size; }
int ProcessGroup::local_rank() const noexcept { return state_->environment.local_rank; }
int ProcessGroup::local_world_size() const noexcept { return state_->environment.local_world_size; }
at::Device ProcessGroup::device() const noexcept { return state_->device; }
const std::string& ProcessGroup::backend_name() const noexcept { return state_->backend_name; }
const c10::intrusive_ptr<c10d::Backend>& ProcessGroup::backend() const noexcept { return state_->native; }
const c10::intrusive_ptr<c10d::Store>& ProcessGroup::store() const noexcept { return state_->store; }

Work ProcessGroup::all_reduce_async(const at::Tensor& tensor, ReduceOp op) const {
  return Work(state_->open().start_all_reduce(tensor, c10d_op(op)));
}

Work ProcessGroup::broadcast_async(const at::Tensor& tensor, int root) const {
  return Work(state_->open().start_broadcast(tensor, root));
}

void ProcessGroup::all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  state_->open().all_reduce_blocking(tensor, c10d_op(op));
}

void ProcessGroup::broadcast(const at::Tensor& tensor, int root) const {
  state_->open().broadcast_blocking(tensor, root);
}

namespace {

std::vector<std::int64_t> stacked_sizes(int ranks, const at::Tensor& tensor) {
  std::vector<std::int64_t> sizes{ranks};
  sizes.insert(sizes.end(), tensor.sizes().begin(), tensor.sizes().end());
  return sizes;
}

}  // namespace

Work ProcessGroup::all_gather_into_async(const at::Tensor& output, const at::Tensor& tensor) const {
  require_one_type("all_gather", output, tensor);
  return Work(state_->open().start_all_gather(output, tensor));
}

void ProcessGroup::all_gather_into(const at::Tensor& output, const at::Tensor& tensor) const {
  require_one_type("all_gather", output, tensor);
  state_->open().all_gather_blocking(output, tensor);
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
  state_->open().reduce(tensors, options)->wait();
}

Work ProcessGroup::reduce_scatter_async(const at::Tensor& output, const at::Tensor& input, ReduceOp op) const {
  require_one_type("reduce_scatter", output, input);
  return Work(state_->open().start_reduce_scatter(output, input, c10d_op(op)));
}

void ProcessGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) const {
  require_one_type("reduce_scatter", output, input);
  state_->open().reduce_scatter_blocking(output, input, c10d_op(op));
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
  state_->open().gather(outputs, inputs, options)->wait();
  return stacked;
}

void ProcessGroup::scatter(const at::Tensor& output, const at::Tensor& input, int root) const {
  std::vector<at::Tensor> outputs{output};
  std::vector<std::vector<at::Tensor>> inputs;
  if (rank() == root) require_one_type("scatter", output, input);
  if (rank() == root) inputs.push_back(input.detach().contiguous().unbind(0));
  c10d::ScatterOptions options;
  options.rootRank = root;
  state_->open().scatter(outputs, inputs, options)->wait();
}

void ProcessGroup::all_to_all(const at::Tensor& output, const at::Tensor& input,
                              std::vector<std::int64_t> output_splits, std::vector<std::int64_t> input_splits) const {
  require_one_type("all_to_all", output, input);
  at::Tensor target = output.detach();
  at::Tensor source = input.detach().contiguous();
  state_->open().alltoall_base(target, source, output_splits, input_splits, c10d::AllToAllOptions())->wait();
}

Work ProcessGroup::send_async(const at::Tensor& tensor, int destination, int tag) const {
  std::vector<at::Tensor> tensors{tensor};
  return Work(state_->open().send(tensors, destination, tag));
}

Work ProcessGroup::recv_async(const at::Tensor& tensor, int source, int tag) const {
  std::vector<at::Tensor> tensors{tensor};
  return Work(state_->open().recv(tensors, source, tag));
}

void ProcessGroup::send(const at::Tensor& tensor, int destination, int tag) const {
  send_async(tensor, destination, tag).wait();
}

void ProcessGroup::recv(const at::Tensor& tensor, int source, int tag) const { recv_async(tensor, source, tag).wait(); }

int ProcessGroup::recv_any(const at::Tensor& tensor, int tag) const {
  std::vector<at::Tensor> tensors{tensor};
  const auto work = state_->open().recvAnysource(tensors, tag);
  work->wait();
  return work->sourceRank();
}

std::optional<ProcessGroup> ProcessGroup::split(const std::vector<int>& ranks) const {
  Backend& backend = state_->open();
  if (backend.is_elastic())
    throw InvalidArgument("split: a group with InitOptions::elastic cannot be split, because its ranks may be lost");
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
  ProcessGroup part(backend.subgroup(store, ranks, environment), store, device(), environment);
  state_->add_part(part.state_);
  return part;
}

std::vector<std::string> ProcessGroup::all_gather_bytes(std::string_view bytes) const {
  const auto options = at::TensorOptions(at::kByte);
  const at::Device where = state_->open().control_device();
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

void ProcessGroup::barrier() const { state_->open().barrier_blocking(); }

at::Tensor ProcessGroup::allocate(at::IntArrayRef sizes, at::ScalarType dtype) const {
  const auto options = at::TensorOptions(dtype).device(device());
  const std::int64_t numel = c10::multiply_integers(sizes);
  if (numel != 0 && state_->open().supportsTensorAlloc(device().index()))
    return state_->open().allocateTensor(numel, options).view(sizes);
  return at::empty(sizes, options);
}

Regroup ProcessGroup::shrink(int min_ranks) const {
  State& state = *state_;
  auto [backend, old_rank_of] = state.open().shrink(min_ranks);
  Regroup change{.generation = ++state.generation, .lost = {}, .old_rank_of = std::move(old_rank_of)};
  for (int r = 0; r < world_size(); ++r) {
    if (std::ranges::find(change.old_rank_of, r) == change.old_rank_of.end()) change.lost.push_back(r);
  }
  state.continue_in(std::move(backend));
  return change;
}

bool ProcessGroup::is_joining() const noexcept { return state_->joining_name.has_value(); }

std::uint64_t ProcessGroup::generation() const noexcept { return state_->generation; }

void ProcessGroup::check() const { state_->open().check(); }

void ProcessGroup::abort(const std::string& reason) const noexcept { state_->abort(reason); }

bool ProcessGroup::shutdown(std::chrono::milliseconds limit) const {
  if (limit.count() <= 0)
    throw InvalidArgument(fmt::format("shutdown: the limit is {} ms, but must be positive", limit.count()));
  if (state_->shut_down) return true;
  const std::string obstacle = state_->backend->end(clamp_timeout(limit));
  if (!obstacle.empty()) {
    state_->backend->abort_group(fmt::format("shutdown: {}", obstacle));
    return false;
  }
  state_->backend->leave();
  state_->shut_down = true;
  return true;
}

}  // namespace ddpkit
