#include "comm/backend.h"

#include <exception>
#include <numeric>
#include <optional>
#include <shared_mutex>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/trace/event_ring.h"

namespace ddpkit {

Backend::Ptr<Backend> Backend::adopt(Ptr<c10d::Backend> backend, at::Device device) {
  if (auto* known = dynamic_cast<Backend*>(backend.get())) return Ptr<Backend>::reclaim_copy(known);
  return c10::make_intrusive<ForwardingBackend>(std::move(backend), device);
}

void Backend::set_elastic(const Ptr<c10d::Store>& /*store*/, const LaunchEnvironment& /*environment*/) {
  throw Error(fmt::format("{} has no elastic groups", getBackendName()));
}

Backend::Remainder Backend::shrink(int /*min_ranks*/) {
  throw InvalidArgument("shrink: the group was created without InitOptions::elastic");
}

Backend::Ptr<Backend> Backend::connect_with_new(const Ptr<c10d::Store>& /*store*/, int /*rank*/,
                                                const std::vector<int>& /*names*/) {
  throw Error(fmt::format("new ranks cannot join a group of {}", getBackendName()));
}

Backend::WorkPtr Backend::start_all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  Tensors tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return allreduce(tensors, options);
}

Backend::WorkPtr Backend::start_broadcast(const at::Tensor& tensor, int root) {
  Tensors tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return broadcast(tensors, options);
}

// The backends support different shapes, so these calls pass flat views.
Backend::WorkPtr Backend::start_all_gather(const at::Tensor& output, const at::Tensor& input) {
  at::Tensor flat_output = output.detach().view({-1}), flat_input = input.detach().contiguous().view({-1});
  return _allgather_base(flat_output, flat_input, c10d::AllgatherOptions());
}

Backend::WorkPtr Backend::start_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                               const c10d::ReduceOp& op) {
  at::Tensor flat_output = output.detach().view({-1}), flat_input = input.detach().view({-1});
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  return _reduce_scatter_base(flat_output, flat_input, options);
}

void Backend::all_reduce_blocking(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  start_all_reduce(tensor, op)->wait();
}

void Backend::all_gather_blocking(const at::Tensor& output, const at::Tensor& input) {
  start_all_gather(output, input)->wait();
}

void Backend::reduce_scatter_blocking(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) {
  start_reduce_scatter(output, input, op)->wait();
}

void Backend::broadcast_blocking(const at::Tensor& tensor, int root) { start_broadcast(tensor, root)->wait(); }

void Backend::barrier_blocking() {
  c10d::BarrierOptions options;
  if (control_device().is_cuda()) options.device_ids = {control_device().index()};  // c10d would choose by the rank.
  barrier(options)->wait();
}

/// A call of the inner backend. Owns the group: the work may end after the program has released the group.
class ForwardingBackend::TracedWork final : public c10d::Work {
 public:
  /// `number`: in the agreement; empty without an agreement, and for messages.
  TracedWork(WorkPtr work, Ptr<ForwardingBackend> group, std::uint64_t event, std::optional<std::uint64_t> number)
      : c10d::Work(group->getRank(), work->retrieveOpType()),
        work_(std::move(work)),
        group_(std::move(group)),
        event_(event),
        number_(number) {}

  bool isCompleted() override { return number_ ? group_->agreement_->test(*number_) : work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess() && !(group_->hides_aborts_ && group_->guard_->failed()); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work_->getFuture(); }

  bool wait(std::chrono::milliseconds timeout) override {
    bool result = false;
    try {
      if (number_) group_->agreement_->wait(*number_, timeout);
      result = work_->wait(timeout);
    } catch (const std::exception& error) {
      if (number_) throw;
      if (group_->guard_) group_->guard_->throw_failure(kPatience);
      if (!group_->hides_aborts_) record_failure(error.what());
      throw;
    }
    if (group_->hides_aborts_) {
      if (!number_) group_->check();  // With a number, all ranks have completed the call.
    } else if (event_ != kNoEvent) {  // On a device, only the guard knows when the call ends.
      EventRing::of_process().finish(event_);
      if (group_->guard_) group_->guard_->note_end(event_);
    }
    return result;
  }

 private:
  /// c10d's backends report a timeout only in the text of the error.
  void record_failure(std::string_view text) const {
    const bool late =
        text.find("imed out") != text.npos || text.find("timeout") != text.npos || text.find("Timeout") != text.npos;
    if (event_ != kNoEvent)
      EventRing::of_process().fail(late ? FailureKind::kTimeout : FailureKind::kPeerLost, std::nullopt);
  }

  const WorkPtr work_;
  const Ptr<ForwardingBackend> group_;
  const std::uint64_t event_;  ///< Index in the ring of events.
  const std::optional<std::uint64_t> number_;
};

ForwardingBackend::ForwardingBackend(Ptr<c10d::Backend> inner, at::Device device, std::unique_ptr<GroupGuard> guard,
                                     bool hides_aborts)
    : Backend(inner->getRank(), inner->getSize()),
      device_(device),
      guard_(std::move(guard)),
      inner_(std::move(inner)),
      hides_aborts_(hides_aborts),
      records_(size_ > 1),
      group_number_(EventRing::of_process().new_group()) {
  if (guard_) guard_->set_group(group_number_);
}

void ForwardingBackend::leave() noexcept {
  if (EventRing::of_process().is_world(group_number_)) EventRing::of_process().leave();
}

void ForwardingBackend::abort_group(const std::string& reason) noexcept {
  if (agreement_) return agreement_->engine()->abort(reason);
  if (guard_) return guard_->abort(reason);
  try {
    inner_->abort();
  } catch (const std::exception&) {
    // The other ranks detect the end of this process.
  }
}

void ForwardingBackend::check() {
  // Another rank may have completed the same collectives without knowing the failure, and may update its weights.
  if (is_elastic()) return;
  if (guard_) guard_->throw_failure();
}

std::string ForwardingBackend::end(std::chrono::milliseconds limit) {
  if (guard_) {
    std::string obstacle = agreement_ ? agreement_->end(limit) : "";
    if (obstacle.empty()) obstacle = guard_->end(limit);
    if (obstacle.empty()) guard_->stop();
    return obstacle;
  }
  try {
    c10d::BarrierOptions options;
    options.timeout = limit;
    inner_->barrier(options)->wait(limit);
    inner_->shutdown();
    return {};
  } catch (const std::exception& error) {
    return error.what();
  }
}

Backend::Ptr<Backend> ForwardingBackend::subgroup(const Ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                                  const LaunchEnvironment& /*part*/) {
  if (!inner_->supportsSplitting())
    throw InvalidArgument(
        fmt::format("split: the backend \"{}\" cannot create a group of some of its ranks", getBackendName()));
  return adopt(inner_->split(store, ranks, inner_->getBackendOptions()), device_);
}

void ForwardingBackend::start_agreement(std::shared_ptr<shm::Engine> engine) {
  agreement_ = std::make_unique<Agreement>(std::move(engine), *guard_);
}

Backend::Ptr<ForwardingBackend> ForwardingBackend::connect_again(const std::shared_ptr<shm::Engine>& engine) {
  try {
    RemainingStore remaining = connect_remaining(engine);
    LaunchEnvironment place;
    place.rank = place.local_rank = engine->rank();
    place.world_size = place.local_world_size = engine->world_size();
    auto next = reconnect(remaining.store, place, engine->name(), [&] { engine->check_ranks(); });
    next->agreement_ = std::make_unique<Agreement>(engine, *next->guard_, std::move(remaining.server));
    // Another rank may be lost after this rank has connected to it.
    engine->run({.kind = shm::CollectiveKind::kBarrier, .recorded = false});
    return next;
  } catch (const std::exception& error) {
    try {
      engine->check_ranks();
    } catch (const PeerLost&) {
      return nullptr;
    }
    engine->abort(error.what());
    throw;
  }
}

Backend::Remainder ForwardingBackend::shrink(int min_ranks) {
  if (!agreement_) return Backend::shrink(min_ranks);
  Remainder remainder{.backend = nullptr, .old_rank_of = std::vector<int>(static_cast<std::size_t>(size_))};
  std::iota(remainder.old_rank_of.begin(), remainder.old_rank_of.end(), 0);
  std::shared_ptr<shm::Engine> engine = agreement_->engine();
  Ptr<ForwardingBackend> next;
  while (!next) {
    std::vector<int> members;
    engine = share(engine->shrink(min_ranks, members));
    for (int& member : members) member = remainder.old_rank_of[static_cast<std::size_t>(member)];
    remainder.old_rank_of = std::move(members);
    next = connect_again(engine);
  }
  remainder.backend = std::move(next);
  return remainder;
}

int ForwardingBackend::name() const noexcept { return agreement_ ? agreement_->engine()->name() : rank_; }

std::atomic<std::uint64_t>* ForwardingBackend::join_step() noexcept {
  return agreement_ ? &agreement_->engine()->join_step() : nullptr;
}

Backend::Ptr<Backend> ForwardingBackend::connect_with_new(const Ptr<c10d::Store>& store, int rank,
                                                          const std::vector<int>& names) {
  const auto engine = ddpkit::connect_with_new(agreement_->engine(), store, rank, names);
  Ptr<Backend> next = connect_again(engine);
  if (!next) engine->check_ranks();  // Throws.
  return next;
}

void ForwardingBackend::follow(const Backend& former) noexcept {
  EventRing& ring = EventRing::of_process();
  if (ring.is_world(static_cast<const ForwardingBackend&>(former).group_number_)) ring.continue_world(group_number_);
}

/// The errors of c10d's backends do not name the device.
void ForwardingBackend::check_device(EventKind kind, const at::Tensor& tensor) const {
  if (!guard_ || !tensor.defined()) return;
  const at::Device its = tensor.device();
  if (its.type() == device_.type() && (its.is_cpu() || its.index() == device_.index() || !device_.has_index())) return;
  throw InvalidArgument(fmt::format("{}: the tensor is on {}, but this group's {} works on {}: move the tensor there",
                                    name_of(kind), its.str(), getBackendName(), device_.str()));
}

std::pair<Event, std::uint64_t> ForwardingBackend::begin(EventKind kind, std::uint64_t bytes) {
  Event event{.kind = kind, .group = group_number_, .bytes = bytes};
  if (!records_) return {event, kNoEvent};
  event.sequence = sequence_++;
  return {event, EventRing::of_process().begin(event)};
}

template <class Start>
Backend::WorkPtr ForwardingBackend::trace(EventKind kind, const at::Tensor& tensor, const Tensors& others,
                                          const Start& start) {
  check_device(kind, tensor);
  for (const at::Tensor& other : others) check_device(kind, other);
  const auto [event, index] = begin(kind, tensor.defined() ? tensor.nbytes() : 0);
  if (agreement_) {
    agreement_->check();
  } else {
    check();
  }
  WorkPtr work;
  try {
    const std::shared_lock lock(starts_);
    work = start();
  } catch (const c10::DistBackendError& error) {
    if (agreement_) agreement_->fail(error.what());
    if (guard_) guard_->throw_failure(kPatience);
    throw;
  }
  std::optional<std::uint64_t> number;
  if (guard_) {
    const auto has_ended = end_of(work);
    if (has_ended) {
      guard_->watch(index, event, has_ended);
    } else if (index != kNoEvent) {
      EventRing::of_process().finish(index);
    }
    const bool is_message = kind == EventKind::kSend || kind == EventKind::kReceive;
    if (!is_message) work = ending(std::move(work));
    if (agreement_ && !is_message) number = agreement_->add(work, has_ended);
  }
  return c10::make_intrusive<TracedWork>(std::move(work), Ptr<ForwardingBackend>::reclaim_copy(this), index, number);
}

namespace {

at::Tensor first(const std::vector<at::Tensor>& tensors) { return tensors.empty() ? at::Tensor() : tensors[0]; }

}  // namespace

Backend::WorkPtr ForwardingBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return trace(EventKind::kAllReduce, first(tensors), {}, [&] { return inner_->allreduce(tensors, options); });
}

Backend::WorkPtr ForwardingBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return trace(EventKind::kReduce, first(tensors), {}, [&] { return inner_->reduce(tensors, options); });
}

Backend::WorkPtr ForwardingBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return trace(EventKind::kBroadcast, first(tensors), {}, [&] { return inner_->broadcast(tensors, options); });
}

Backend::WorkPtr ForwardingBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  return trace(EventKind::kAllGather, first(inputs), {}, [&] { return inner_->allgather(outputs, inputs, options); });
}

Backend::WorkPtr ForwardingBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& options) {
  return trace(EventKind::kAllGather, input, {output}, [&] { return inner_->_allgather_base(output, input, options); });
}

Backend::WorkPtr ForwardingBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::GatherOptions& options) {
  return trace(EventKind::kGather, first(inputs), {}, [&] { return inner_->gather(outputs, inputs, options); });
}

Backend::WorkPtr ForwardingBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ScatterOptions& options) {
  return trace(EventKind::kScatter, first(outputs), {}, [&] { return inner_->scatter(outputs, inputs, options); });
}

Backend::WorkPtr ForwardingBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                   const c10d::ReduceScatterOptions& options) {
  return trace(EventKind::kReduceScatter, first(outputs), {},
               [&] { return inner_->reduce_scatter(outputs, inputs, options); });
}

Backend::WorkPtr ForwardingBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                         const c10d::ReduceScatterOptions& options) {
  return trace(EventKind::kReduceScatter, input, {output},
               [&] { return inner_->_reduce_scatter_base(output, input, options); });
}

Backend::WorkPtr ForwardingBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                  std::vector<int64_t>& output_splits,
                                                  std::vector<int64_t>& input_splits,
                                                  const c10d::AllToAllOptions& options) {
  return trace(EventKind::kAllToAll, input, {output},
               [&] { return inner_->alltoall_base(output, input, output_splits, input_splits, options); });
}

Backend::WorkPtr ForwardingBackend::send(Tensors& tensors, int destination, int tag) {
  return trace(EventKind::kSend, first(tensors), {}, [&] { return inner_->send(tensors, destination, tag); });
}

Backend::WorkPtr ForwardingBackend::recv(Tensors& tensors, int source, int tag) {
  return trace(EventKind::kReceive, first(tensors), {}, [&] { return inner_->recv(tensors, source, tag); });
}

Backend::WorkPtr ForwardingBackend::recvAnysource(Tensors& tensors, int tag) {
  return trace(EventKind::kReceive, first(tensors), {}, [&] { return inner_->recvAnysource(tensors, tag); });
}

Backend::WorkPtr ForwardingBackend::barrier(const c10d::BarrierOptions& options) {
  return trace(EventKind::kBarrier, at::Tensor(), {}, [&] { return inner_->barrier(options); });
}

}  // namespace ddpkit
