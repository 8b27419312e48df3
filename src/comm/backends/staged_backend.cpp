#include "comm/backends/staged_backend.h"

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <utility>

#include <ddpkit/error.h>

#include "comm/backends/shm_backend.h"
#include "comm/timeout.h"

namespace ddpkit {

using c10d::OpType;

StagedBackend::StagedBackend(Ptr<Backend> host, Ptr<Backend> staged, std::unique_ptr<StagingQueue> queue,
                             at::Device device)
    : Backend(host->getRank(), host->getSize()),
      host_(std::move(host)),
      staged_(std::move(staged)),
      queue_(std::move(queue)),
      device_(device),
      thread_([this] { run(); }) {}

StagedBackend::~StagedBackend() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void StagedBackend::setTimeout(std::chrono::milliseconds timeout) {
  host_->setTimeout(timeout);
  staged_->setTimeout(timeout);
}

void StagedBackend::abort_group(const std::string& reason) noexcept {
  for (const auto& group : {host_, staged_}) group->abort_group(reason);
}

void StagedBackend::rethrow_failure() {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void StagedBackend::check() {
  rethrow_failure();
  for (const auto& group : {host_, staged_}) group->check();
}

std::string StagedBackend::end(std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  if (!poll_until(deadline, [this] { return !last_ || last_->isCompleted(); }))
    return fmt::format("a collective of rank {} has not ended within {} ms", rank_, limit.count());
  for (const auto& group : {staged_, host_}) {
    if (std::string obstacle = group->end(time_until(deadline)); !obstacle.empty()) return obstacle;
  }
  return {};
}

void StagedBackend::run() {
  while (true) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ends_ || !queued_.empty(); });
    if (queued_.empty()) return;
    const auto work = std::move(queued_.front());
    queued_.pop_front();
    lock.unlock();
    run(*work);
  }
}

void StagedBackend::run(StagedWork& work) {
  std::exception_ptr failure;
  std::string reason;
  try {
    rethrow_failure();
    const auto timeout = clamp_timeout(getBackendOptions()->timeout);
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    const auto copied = queue_->copy(work.in_, work.ready_.get());
    while (!copied->query()) {
      if (std::chrono::steady_clock::now() >= deadline)
        throw Timeout(fmt::format("rank {}: {} has not finished the work before a collective within {} ms", rank_,
                                  device_.str(), timeout.count()));
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    work.collective_(work.host_);
    work.done_ = queue_->copy(work.out_, nullptr);
  } catch (const std::exception& error) {
    failure = std::current_exception();
    reason = error.what();
  } catch (...) {
    failure = std::current_exception();
    reason = "an unknown exception";
  }
  // Before finish(): whoever waits may then reuse the memory.
  work.collective_ = nullptr;
  work.host_.clear();
  work.in_.clear();
  work.out_.clear();
  if (failure) fail(failure, reason);
  work.finish(failure);
}

void StagedBackend::fail(const std::exception_ptr& failure, const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = failure;
  }
  abort_group(reason);  // The other ranks would wait for this rank.
}

bool StagedBackend::staged(const char* call, std::initializer_list<const Tensors*> lists) const {
  std::size_t all = 0, ours = 0;
  for (const Tensors* list : lists) {
    for (const at::Tensor& tensor : *list) {
      if (!tensor.defined()) throw InvalidArgument(fmt::format("{}: a tensor is undefined", call));
      ++all;
      if (!queue_->owns(tensor)) continue;
      ++ours;
      if (tensor.layout() != at::kStrided)
        throw InvalidArgument(fmt::format("{}: the shm backend takes dense tensors, not {} on {}", call,
                                          c10::str(tensor.layout()), tensor.device().str()));
    }
  }
  if (ours != 0 && ours != all)
    throw InvalidArgument(fmt::format("{}: the tensors must all be on the host, or all on the device", call));
  return ours != 0;
}

StagedBackend::WorkPtr StagedBackend::stage(const char* call, OpType type, std::vector<Part> parts,
                                            Collective collective) {
  rethrow_failure();
  queue_->refuse_capture(call);
  Tensors host;
  for (const Part& part : parts) host.push_back(queue_->host_memory(part.tensor.sizes(), part.tensor.scalar_type()));
  auto work = c10::make_intrusive<StagedWork>(
      rank_, type,
      [staged = staged_, collective = std::move(collective)](Tensors& memory) { collective(*staged, memory)->wait(); },
      std::move(host));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].in) work->in_.emplace_back(work->host_[i], parts[i].tensor);
    if (!parts[i].out) continue;
    work->out_.emplace_back(parts[i].tensor, work->host_[i]);
    work->outputs_.push_back(parts[i].tensor);
  }
  work->ready_ = queue_->mark_caller();
  {
    const std::lock_guard lock(mutex_);
    queued_.push_back(work);
  }
  changed_.notify_one();
  last_ = work;
  return work;
}

StagedBackend::WorkPtr StagedBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (!staged("all_reduce", {&tensors})) return host_->allreduce(tensors, options);
  if (options.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM)
    throw InvalidArgument("all_reduce: the shm backend has no PREMUL_SUM for tensors of a device");
  std::vector<Part> parts;
  for (const at::Tensor& tensor : tensors) parts.push_back({tensor, true, true});
  return stage("all_reduce", OpType::ALLREDUCE, std::move(parts),
               [options](c10d::Backend& backend, Tensors& host) { return backend.allreduce(host, options); });
}

StagedBackend::WorkPtr StagedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  if (!staged("reduce", {&tensors})) return host_->reduce(tensors, options);
  if (options.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM)
    throw InvalidArgument("reduce: the shm backend has no PREMUL_SUM for tensors of a device");
  std::vector<Part> parts;
  for (const at::Tensor& tensor : tensors) parts.push_back({tensor, true, options.rootRank == rank_});
  return stage("reduce", OpType::REDUCE, std::move(parts),
               [options](c10d::Backend& backend, Tensors& host) { return backend.reduce(host, options); });
}

StagedBackend::WorkPtr StagedBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  if (!staged("broadcast", {&tensors})) return host_->broadcast(tensors, options);
  std::vector<Part> parts;
  for (const at::Tensor& tensor : tensors)
    parts.push_back({tensor, options.rootRank == rank_, options.rootRank != rank_});
  return stage("broadcast", OpType::BROADCAST, std::move(parts),
               [options](c10d::Backend& backend, Tensors& host) { return backend.broadcast(host, options); });
}

namespace {

/// The host copies for a collective on lists: first the inputs, then the outputs.
struct Lists {
  Lists(const std::vector<at::Tensor>& host, std::size_t inputs)
      : in(host.begin(), host.begin() + static_cast<std::ptrdiff_t>(inputs)),
        out(host.begin() + static_cast<std::ptrdiff_t>(inputs), host.end()) {}
  std::vector<at::Tensor> in, out;
};

/// Returns the tensors of a list of at most one list.
std::vector<at::Tensor> list_of(const std::vector<std::vector<at::Tensor>>& lists, const char* call) {
  if (lists.size() > 1) throw InvalidArgument(fmt::format("{}: one list of tensors is needed", call));
  return lists.empty() ? std::vector<at::Tensor>() : lists[0];
}

}  // namespace

std::vector<StagedBackend::Part> StagedBackend::parts_of(const Tensors& inputs, const Tensors& outputs) {
  std::vector<Part> parts;
  for (const at::Tensor& input : inputs) parts.push_back({input, true, false});
  for (const at::Tensor& output : outputs) parts.push_back({output, false, true});
  return parts;
}

StagedBackend::WorkPtr StagedBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                const c10d::AllgatherOptions& options) {
  const Tensors list = list_of(outputs, "all_gather");
  if (!staged("all_gather", {&list, &inputs})) return host_->allgather(outputs, inputs, options);
  std::vector<Part> parts = parts_of(inputs, list);
  return stage("all_gather", OpType::ALLGATHER, std::move(parts),
               [options, count = inputs.size()](c10d::Backend& backend, Tensors& host) {
                 Lists lists(host, count);
                 std::vector<Tensors> out{lists.out};
                 return backend.allgather(out, lists.in, options);
               });
}

StagedBackend::WorkPtr StagedBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::AllgatherOptions& options) {
  const Tensors all{output, input};
  if (!staged("all_gather", {&all})) return host_->_allgather_base(output, input, options);
  return stage(
      "all_gather", OpType::_ALLGATHER_BASE, {{output, false, true}, {input, true, false}},
      [options](c10d::Backend& backend, Tensors& host) { return backend._allgather_base(host[0], host[1], options); });
}

StagedBackend::WorkPtr StagedBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                             const c10d::GatherOptions& options) {
  const Tensors list = list_of(outputs, "gather");
  if (!staged("gather", {&list, &inputs})) return host_->gather(outputs, inputs, options);
  std::vector<Part> parts = parts_of(inputs, list);
  return stage("gather", OpType::GATHER, std::move(parts),
               [options, copies = outputs.size(), count = inputs.size()](c10d::Backend& backend, Tensors& host) {
                 Lists lists(host, count);
                 std::vector<Tensors> out(copies, lists.out);
                 return backend.gather(out, lists.in, options);
               });
}

StagedBackend::WorkPtr StagedBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                              const c10d::ScatterOptions& options) {
  const Tensors list = list_of(inputs, "scatter");
  if (!staged("scatter", {&outputs, &list})) return host_->scatter(outputs, inputs, options);
  std::vector<Part> parts = parts_of(list, outputs);
  return stage("scatter", OpType::SCATTER, std::move(parts),
               [options, copies = inputs.size(), count = list.size()](c10d::Backend& backend, Tensors& host) {
                 Lists lists(host, count);
                 std::vector<Tensors> in(copies, lists.in);
                 return backend.scatter(lists.out, in, options);
               });
}

StagedBackend::WorkPtr StagedBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  const Tensors list = list_of(inputs, "reduce_scatter");
  if (!staged("reduce_scatter", {&outputs, &list})) return host_->reduce_scatter(outputs, inputs, options);
  std::vector<Part> parts = parts_of(list, outputs);
  return stage("reduce_scatter", OpType::REDUCE_SCATTER, std::move(parts),
               [options, count = list.size()](c10d::Backend& backend, Tensors& host) {
                 Lists lists(host, count);
                 std::vector<Tensors> in{lists.in};
                 return backend.reduce_scatter(lists.out, in, options);
               });
}

StagedBackend::WorkPtr StagedBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                           const c10d::ReduceScatterOptions& options) {
  const Tensors all{output, input};
  if (!staged("reduce_scatter", {&all})) return host_->_reduce_scatter_base(output, input, options);
  return stage("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, {{output, false, true}, {input, true, false}},
               [options](c10d::Backend& backend, Tensors& host) {
                 return backend._reduce_scatter_base(host[0], host[1], options);
               });
}

StagedBackend::WorkPtr StagedBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                    std::vector<int64_t>& output_splits,
                                                    std::vector<int64_t>& input_splits,
                                                    const c10d::AllToAllOptions& options) {
  const Tensors all{output, input};
  if (!staged("all_to_all", {&all})) return host_->alltoall_base(output, input, output_splits, input_splits, options);
  return stage("all_to_all", OpType::ALLTOALL_BASE, {{output, false, true}, {input, true, false}},
               [options, output_splits, input_splits](c10d::Backend& backend, Tensors& host) {
                 auto out = output_splits, in = input_splits;
                 return backend.alltoall_base(host[0], host[1], out, in, options);
               });
}

void StagedBackend::refuse_message(const char* call, const Tensors& tensors) const {
  if (staged(call, {&tensors}))
    throw InvalidArgument(
        fmt::format("{}: the shm backend passes messages of the host's tensors only, not on {}: move it to the CPU",
                    call, tensors[0].device().str()));
}

StagedBackend::WorkPtr StagedBackend::send(Tensors& tensors, int destination, int tag) {
  refuse_message("send", tensors);
  return host_->send(tensors, destination, tag);
}

StagedBackend::WorkPtr StagedBackend::recv(Tensors& tensors, int source, int tag) {
  refuse_message("recv", tensors);
  return host_->recv(tensors, source, tag);
}

StagedBackend::WorkPtr StagedBackend::recvAnysource(Tensors& tensors, int tag) {
  refuse_message("recv", tensors);
  return host_->recvAnysource(tensors, tag);
}

Backend::Ptr<Backend> StagedBackend::subgroup(const Ptr<c10d::Store>& store, const std::vector<int>& /*ranks*/,
                                              const LaunchEnvironment& part) {
  return create_staged_shm_backend(store, part.rank, part.world_size, device_, getBackendOptions()->timeout);
}

c10::intrusive_ptr<Backend> create_staged_shm_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                      int world_size, at::Device device,
                                                      std::chrono::milliseconds timeout) {
  auto queue = create_device_queue(device);
  const auto group = [&](const char* name) {
    auto own = store ? c10::make_intrusive<c10d::PrefixStore>(name, store) : c10::intrusive_ptr<c10d::PrefixStore>();
    return create_shm_part(own, rank, world_size, timeout);
  };
  auto host = group("host");
  auto staged = group("staged");
  return c10::make_intrusive<StagedBackend>(std::move(host), std::move(staged), std::move(queue), device);
}

}  // namespace ddpkit
