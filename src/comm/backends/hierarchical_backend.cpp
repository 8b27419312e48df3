#include "comm/backends/hierarchical_backend.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <utility>

#include <ddpkit/error.h>

#include "comm/backends/shm_arguments.h"
#include "comm/backends/shm_backend.h"
#include "comm/timeout.h"

namespace ddpkit {

using c10d::OpType;

CallQueue::CallQueue() : thread_([this] { run(); }) {}

CallQueue::~CallQueue() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void CallQueue::push(std::function<void()> call) {
  {
    const std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
  }
  changed_.notify_one();
}

void CallQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ends_ || !calls_.empty(); });
    if (calls_.empty()) return;
    std::function<void()> call = std::move(calls_.front());
    calls_.pop_front();
    lock.unlock();
    call();
    call = nullptr;  // Destroys the captures without holding the lock.
    lock.lock();
  }
}

/// Completes when all its parts have completed.
class HierarchicalBackend::Job : public c10d::Work {
 public:
  Job(const HierarchicalBackend& backend, OpType type, Tensors outputs, std::size_t parts)
      : c10d::Work(backend.rank_, type),
        outputs_(std::move(outputs)),
        left_(parts),
        unfinished_jobs_(backend.unfinished_jobs_) {
    ++*unfinished_jobs_;
  }

  std::vector<at::Tensor> result() override { return outputs_; }

  void end_part(std::exception_ptr failure = nullptr) {
    if (failure) {
      const std::lock_guard lock(failure_mutex_);
      if (!failure_) failure_ = std::move(failure);
    }
    if (left_.fetch_sub(1) != 1) return;
    --*unfinished_jobs_;  // Before finish(): a caller that has waited may destroy the group.
    finish(failure_);
  }

 private:
  Tensors outputs_;
  std::atomic<std::size_t> left_;
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
  std::shared_ptr<std::atomic<int>> unfinished_jobs_;
};

struct HierarchicalBackend::Piece {
  Ptr<Job> job;
  c10d::ReduceOp op;
  at::Tensor view;    ///< Flat view of the caller's tensor.
  at::Tensor padded;  ///< Padded copy, if the length of `view` is not a multiple of the host's ranks.
  at::Tensor slice;   ///< This rank's slice of the sum.
  WorkPtr on_rail;

  at::Tensor& buffer() { return padded.defined() ? padded : view; }
  bool divides_last() const;
};

HierarchicalBackend::HierarchicalBackend(int rank, int world_size, int local_world_size, Groups groups)
    : Backend(rank, world_size), local_world_size_(local_world_size), groups_(std::move(groups)) {}

HierarchicalBackend::~HierarchicalBackend() {
  if (*unfinished_jobs_ == 0) return;
  ending_ = true;
  abort_group("its process group was destroyed during a collective");
}

void HierarchicalBackend::setTimeout(std::chrono::milliseconds timeout) {
  for (Backend* group : groups_.each()) group->setTimeout(timeout);
}

void HierarchicalBackend::abort_group(const std::string& reason) noexcept {
  for (Backend* group : groups_.each()) group->abort_group(reason);
}

std::string HierarchicalBackend::end(std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  if (!poll_until(deadline, [this] { return *unfinished_jobs_ == 0; }))
    return fmt::format("a collective of rank {} has not ended within {} ms", rank_, limit.count());
  // The group of all ranks comes first: its guard names the missing ranks.
  const auto groups = groups_.each();
  for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
    if (std::string obstacle = (*group)->end(time_until(deadline)); !obstacle.empty()) return obstacle;
  }
  return {};
}

template <class Call>
void HierarchicalBackend::attempt(const Ptr<Job>& job, const Call& call) {
  try {
    try {
      if (ending_) throw Error("the process group was destroyed before the end of its collective; keep it until then");
      call();
    } catch (const Error&) {
      throw;
    } catch (const std::exception&) {
      // gloo does not report the lost rank.
      groups_.all->guard().throw_failure(kPatience);
      throw;
    }
  } catch (const std::exception& error) {
    if (const auto* lost = dynamic_cast<const PeerLost*>(&error);
        lost && lost->context().rank.value_or(rank_) != rank_) {
      // The guards of the gloo groups may not know the failure yet.
      for (const auto& group : {groups_.rail, groups_.all})
        group->guard().fail({FailureKind::kPeerLost, *lost->context().rank, lost->what()});
    }
    abort_group(error.what());
    job->end_part(std::current_exception());
  }
}

HierarchicalBackend::WorkPtr HierarchicalBackend::enqueue(const Ptr<Job>& job, std::function<void()> call) {
  first_.push([this, job, call = std::move(call)] {
    attempt(job, [&] {
      call();
      job->end_part();
    });
  });
  return job;
}

namespace {

/// A contiguous copy or view of a tensor's elements, and the function that copies them back.
struct Flat {
  explicit Flat(const at::Tensor& of) : tensor(of.detach()), dense(tensor.contiguous()) {}
  /// Returns real numbers, which both shm and gloo can reduce.
  at::Tensor numbers() const { return (dense.is_complex() ? at::view_as_real(dense) : dense).view({-1}); }
  /// Returns bytes, for calls that only copy elements: gloo supports fewer types.
  at::Tensor bytes() const { return dense.view({-1}).view(at::kByte); }
  void put_back() const {
    if (!tensor.is_contiguous()) tensor.copy_(dense);
  }
  at::Tensor tensor, dense;
};

const at::Tensor& only_tensor(const char* call, const std::vector<at::Tensor>& tensors) {
  if (tensors.size() != 1 || !tensors[0].defined() || tensors[0].layout() != at::kStrided || !tensors[0].is_cpu())
    throw InvalidArgument(fmt::format("{}: the hierarchical backend takes one dense tensor on the CPU", call));
  check_tensor(tensors[0], call);
  return tensors[0];
}

}  // namespace

HierarchicalBackend::WorkPtr HierarchicalBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const c10d::ReduceOp::RedOpType op = options.reduceOp.op_;
  if (op != c10d::ReduceOp::SUM && op != c10d::ReduceOp::AVG && op != c10d::ReduceOp::MIN &&
      op != c10d::ReduceOp::MAX && op != c10d::ReduceOp::PRODUCT)
    return groups_.all->allreduce(tensors, options);
  const at::Tensor& tensor = only_tensor("all_reduce", tensors);
  check_writable(tensor, "all_reduce");
  reduction(options.reduceOp, tensor, "all_reduce");
  if (op == c10d::ReduceOp::AVG && c10::isIntegralType(tensor.scalar_type(), true))
    throw InvalidArgument(fmt::format("all_reduce: there is no mean of {}", c10::toString(tensor.scalar_type())));
  const auto flat = std::make_shared<Flat>(tensor);
  const at::Tensor values = flat->numbers();
  // Small enough that the network transfer starts early, large enough that its latency is negligible.
  constexpr std::int64_t kPieceBytes = 4 << 20;
  const std::int64_t local = local_world_size_, all = values.numel();
  const std::int64_t largest = std::max<std::int64_t>(1, kPieceBytes / (values.element_size() * local)) * local;
  const std::int64_t pieces = std::max<std::int64_t>(1, (all + largest - 1) / largest);
  // The additional part is the copy back after all pieces.
  auto job = c10::make_intrusive<Job>(*this, OpType::ALLREDUCE, tensors, static_cast<std::size_t>(pieces) + 1);
  for (std::int64_t begin = 0; begin < all; begin += largest) {
    auto piece = std::make_shared<Piece>();
    piece->job = job;
    piece->op = options.reduceOp;
    piece->view = values.narrow(0, begin, std::min(largest, all - begin));
    first_.push([this, piece] { reduce_piece(piece); });
  }
  first_.push([this, job, flat] {
    second_.push([this, job, flat] {
      attempt(job, [&] {
        flat->put_back();
        job->end_part();
      });
    });
  });
  if (all == 0) job->end_part();
  return job;
}

/// The sum of float16 values may overflow although the mean does not, so each level computes a mean. Other types are
/// divided once, at the end.
bool HierarchicalBackend::Piece::divides_last() const {
  return op.op_ == c10d::ReduceOp::AVG && view.scalar_type() != at::kHalf;
}

void HierarchicalBackend::reduce_piece(const std::shared_ptr<Piece>& piece) {
  const std::int64_t numel = piece->view.numel();
  const std::int64_t each = (numel + local_world_size_ - 1) / local_world_size_;
  const c10d::ReduceOp::RedOpType op = piece->divides_last() ? c10d::ReduceOp::SUM : piece->op.op_;
  attempt(piece->job, [&] {
    if (each * local_world_size_ != numel) {
      piece->padded = at::empty({each * local_world_size_}, piece->view.options());
      piece->padded.narrow(0, 0, numel).copy_(piece->view);
      piece->padded.narrow(0, numel, each * local_world_size_ - numel).zero_();
    }
    piece->slice = at::empty({each}, piece->view.options());
    c10d::ReduceScatterOptions scatter;
    scatter.reduceOp = op;
    groups_.in->_reduce_scatter_base(piece->slice, piece->buffer(), scatter)->wait();
    if (hosts() > 1) {
      Tensors slices{piece->slice};
      c10d::AllreduceOptions reduce;
      reduce.reduceOp = op;
      piece->on_rail = groups_.rail->native()->allreduce(slices, reduce);
    }
    second_.push([this, piece] { gather_piece(piece); });
  });
}

void HierarchicalBackend::gather_piece(const std::shared_ptr<Piece>& piece) {
  attempt(piece->job, [&] {
    if (piece->on_rail) piece->on_rail->wait();
    if (piece->divides_last()) piece->slice.div_(size_);
    groups_.out->_allgather_base(piece->buffer(), piece->slice, c10d::AllgatherOptions())->wait();
    if (piece->padded.defined()) piece->view.copy_(piece->padded.narrow(0, 0, piece->view.numel()));
    piece->job->end_part();
  });
}

HierarchicalBackend::WorkPtr HierarchicalBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto flat = std::make_shared<Flat>(only_tensor("broadcast", tensors));
  check_writable(tensors[0], "broadcast");
  if (options.rootRank < 0 || options.rootRank >= size_)
    throw InvalidArgument(fmt::format("broadcast: there is no rank {} in a world of {}", options.rootRank, size_));
  return enqueue(c10::make_intrusive<Job>(*this, OpType::BROADCAST, tensors, 1), [this, flat, root = options.rootRank] {
    Tensors values{flat->bytes()};
    c10d::BroadcastOptions among;
    if (hosts() > 1 && local_rank() == root % local_world_size_) {
      among.rootRank = root / local_world_size_;
      groups_.rail->native()->broadcast(values, among)->wait();
    }
    among.rootRank = root % local_world_size_;
    groups_.in->broadcast(values, among)->wait();
    flat->put_back();
  });
}

HierarchicalBackend::WorkPtr HierarchicalBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                  const c10d::AllgatherOptions& /*options*/) {
  only_tensor("all_gather", {input});
  only_tensor("all_gather", {output});
  check_writable(output, "all_gather");
  if (output.numel() != input.numel() * size_ || output.scalar_type() != input.scalar_type())
    throw InvalidArgument(fmt::format("all_gather: the output holds {} elements of {}, and {} ranks give {} of {} each",
                                      output.numel(), c10::toString(output.scalar_type()), size_, input.numel(),
                                      c10::toString(input.scalar_type())));
  const auto from = std::make_shared<Flat>(input);
  const auto to = std::make_shared<Flat>(output);
  return enqueue(c10::make_intrusive<Job>(*this, OpType::_ALLGATHER_BASE, Tensors{output}, 1), [this, from, to] {
    at::Tensor rail = from->bytes();
    const std::int64_t numel = rail.numel(), local = local_world_size_;
    const auto across = static_cast<std::int64_t>(hosts());
    if (hosts() > 1) {
      at::Tensor own = rail;
      rail = at::empty({across * numel}, own.options());
      groups_.rail->native()->_allgather_base(rail, own, c10d::AllgatherOptions())->wait();
    }
    at::Tensor host = at::empty({local * across * numel}, rail.options());
    groups_.in->_allgather_base(host, rail, c10d::AllgatherOptions())->wait();
    to->bytes().view({across, local, numel}).copy_(host.view({local, across, numel}).transpose(0, 1));
    to->put_back();
  });
}

HierarchicalBackend::WorkPtr HierarchicalBackend::barrier(const c10d::BarrierOptions& /*options*/) {
  return enqueue(c10::make_intrusive<Job>(*this, OpType::BARRIER, Tensors{}, 1), [this] {
    groups_.in->barrier(c10d::BarrierOptions())->wait();
    if (hosts() > 1) groups_.rail->native()->barrier(c10d::BarrierOptions())->wait();
  });
}

namespace {

/// Throws on all ranks: all ranks see the same values.
void check_hosts(const c10::intrusive_ptr<c10d::Store>& store, const LaunchEnvironment& environment) {
  const auto key = [](int rank) { return fmt::format("place-{}", rank); };
  const std::string own = fmt::format("{} of {}", environment.local_rank, environment.local_world_size);
  store->set(key(environment.rank), std::vector<std::uint8_t>(own.begin(), own.end()));
  const std::vector<std::uint8_t> first = store->get(key(0));
  const std::string text(first.begin(), first.end());
  const std::string local = text.substr(text.rfind(' ') + 1);
  const int local_world_size = std::stoi(local);
  for (int rank = 0; rank < environment.world_size; ++rank) {
    const std::vector<std::uint8_t> bytes = store->get(key(rank));
    const std::string place(bytes.begin(), bytes.end());
    if (place != fmt::format("{} of {}", rank % local_world_size, local_world_size))
      throw InvalidArgument(
          fmt::format("the hierarchical backend needs equally many ranks on each host, numbered host by host, but rank "
                      "{} is number {} on its host, and rank 0 number {}; use gloo",
                      rank, place, text));
  }
  if (environment.world_size % local_world_size != 0)
    throw InvalidArgument(
        fmt::format("the hierarchical backend needs equally many ranks on each host, but {} ranks are "
                    "not a multiple of {}; use gloo",
                    environment.world_size, local_world_size));
}

}  // namespace

c10::intrusive_ptr<Backend> create_hierarchical_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                        const LaunchEnvironment& environment,
                                                        std::chrono::milliseconds timeout) {
  const auto within = [&](const std::string& name) { return c10::make_intrusive<c10d::PrefixStore>(name, store); };
  check_hosts(within("hosts"), environment);
  const int local = environment.local_world_size, hosts = environment.world_size / local;
  const int host = environment.rank / local;
  LaunchEnvironment rail = environment;
  rail.rank = host;
  rail.world_size = hosts;
  rail.local_rank = 0;
  rail.local_world_size = 1;
  HierarchicalBackend::Groups groups{
      .in = create_shm_part(within(fmt::format("in-{}", host)), environment.local_rank, local, timeout, host * local),
      .out = create_shm_part(within(fmt::format("out-{}", host)), environment.local_rank, local, timeout, host * local),
      .rail =
          create_gloo_backend(within(fmt::format("rail-{}", environment.local_rank)), rail, timeout, environment.rank),
      .all = create_gloo_backend(within("all"), environment, timeout)};
  return c10::make_intrusive<HierarchicalBackend>(environment.rank, environment.world_size, local, std::move(groups));
}

}  // namespace ddpkit
