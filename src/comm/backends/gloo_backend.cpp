#include <ddpkit/error.h>

#include "comm/backend.h"

#ifdef DDPKIT_GLOO
#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ops/div.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/backends/gloo_devices.h"
#include "comm/backends/gloo_work.h"
#include "comm/roll_call.h"
#include "comm/shm_rendezvous.h"
#include "comm/timeout.h"

namespace ddpkit {
namespace {

/// The guard reports the late rank. gloo's timeout must come after the guard's.
constexpr std::chrono::seconds kGlooAfterGuard(2);

/// gloo writes to connections that may have ended. gloo's threads inherit this thread's signal mask.
class SigpipeBlocked {
 public:
  SigpipeBlocked() {
    sigset_t pipe;
    ::sigemptyset(&pipe);
    ::sigaddset(&pipe, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &pipe, &before_);
  }
  ~SigpipeBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

/// How long gloo's threads sleep before they count as stuck.
constexpr std::chrono::milliseconds kSleep(500);

/// ProcessGroupGloo divides after the sum, and its reduce() does not divide. For float16, this class divides before the
/// sum, as DistributedDataParallel in Python does: the sum may overflow although the mean does not.
class GlooGroup final : public c10d::ProcessGroupGloo {
 public:
  /// `options` has the devices of `devices`.
  GlooGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
            const c10::intrusive_ptr<Options>& options, GlooDevices devices)
      : ProcessGroupGloo(store, rank, size, options), devices_(std::move(devices)) {
    const std::vector<int> sockets = devices_.connected();
    // With another count, an epoll instance is that of a foreign library. Its sockets must not be shut down.
    if (sockets.size() != options->devices.size() * static_cast<std::size_t>(size - 1)) return;
    for (const int fd : sockets) sockets_.push_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  }

  ~GlooGroup() override {
    for (const int fd : sockets_) ::close(fd);
  }

  /// gloo has no abort. A collective fails if one of its connections ends.
  void end_connections() {
    for (const int fd : sockets_) ::shutdown(fd, SHUT_RD);  // SHUT_WR would cause SIGPIPE in gloo.
    has_ended_ = true;
  }

  /// Returns whether collectives that have not ended after end_connections() only wait for their timeout. gloo does not
  /// end a wait for a send that was in progress when its connection ended (Pair::signalException). And it no longer
  /// reads from a connection on which it was receiving for a collective that has failed (Pair::prepareRead). Then its
  /// threads sleep, and write to no tensor any more.
  bool is_stuck() const {
    if (!has_ended_ || sockets_.empty()) return false;
    const std::string before = state();
    if (before.empty()) return false;
    std::this_thread::sleep_for(kSleep);
    return state() == before;
  }

  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return ProcessGroupGloo::allreduce(tensors, divide_first(tensors, options));
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return ProcessGroupGloo::allreduce_coalesced(tensors, divide_first(tensors, options));
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    if (options.reduceOp.op_ != c10d::ReduceOp::AVG || tensors.size() != 1)
      return ProcessGroupGloo::reduce(tensors, options);
    if (at::isIntegralType(tensors[0].scalar_type(), true))
      throw InvalidArgument("gloo's reduce() has no mean of integers: sum them and divide, or use all_reduce()");
    const at::NoGradGuard no_grad;
    c10d::ReduceOptions sum = options;
    sum.reduceOp = c10d::ReduceOp::SUM;
    if (options.rootRank == getRank()) {
      tensors[0].div_(getSize());
      return ProcessGroupGloo::reduce(tensors, sum);
    }
    Tensors quotients{tensors[0] / getSize()};  // The other ranks keep their values.
    return ProcessGroupGloo::reduce(quotients, sum);
  }

 private:
  template <class Options>
  Options divide_first(Tensors& tensors, Options options) const {
    if (options.reduceOp.op_ != c10d::ReduceOp::AVG || tensors.empty() || tensors[0].scalar_type() != at::kHalf)
      return options;
    const at::NoGradGuard no_grad;
    for (at::Tensor& tensor : tensors) tensor.div_(getSize());
    options.reduceOp = c10d::ReduceOp::SUM;
    return options;
  }

  /// Returns how often gloo's threads have run, and what they have not read. Returns nothing if one of them runs, or
  /// will read the end of a connection.
  std::string state() const {
    std::string state = runs_of_gloo_threads();
    for (const int fd : devices_.connected()) {
      int unread = 0;
      if (state.empty() || ::ioctl(fd, FIONREAD, &unread) != 0 || unread == 0) return {};
      state += fmt::format(" {} of {}", unread, fd);
    }
    return state;
  }

  const GlooDevices devices_;
  std::vector<int> sockets_;  ///< Duplicates of gloo's sockets.
  std::atomic<bool> has_ended_ = false;
};

/// `limit`: for each connection. gloo waits five times as long as its timeout for one.
c10::intrusive_ptr<GlooGroup> connect_once(const c10::intrusive_ptr<c10d::Store>& store,
                                           const LaunchEnvironment& environment, std::chrono::milliseconds limit) {
  const SigpipeBlocked blocked;
  auto options = c10d::ProcessGroupGloo::Options::create(limit / 5);
  GlooDevices devices(environment);
  options->devices = devices.list();
  options->threads = std::max(options->threads, static_cast<int>(options->devices.size()) * 2);
  return c10::make_intrusive<GlooGroup>(store, environment.rank, environment.world_size, options, std::move(devices));
}

/// A connection of gloo cannot be ended from outside, and one to a rank that has ended lasts until its limit. So the
/// first limit is short. If a rank did not connect in time, all try again with a longer one, up to `longest`.
/// `timeout`: of the collectives. Collective.
c10::intrusive_ptr<GlooGroup> connect_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                           const LaunchEnvironment& environment, std::chrono::milliseconds timeout,
                                           std::chrono::milliseconds longest) {
  for (std::chrono::milliseconds limit(500);; limit *= 2) {
    const auto own = c10::make_intrusive<c10d::PrefixStore>(fmt::format("gloo within {} ms", limit.count()), store);
    RollCall roll_call(own, "connected", environment.rank, environment.world_size, clamp_timeout(timeout));
    c10::intrusive_ptr<GlooGroup> group;
    std::string error;
    try {
      group = connect_once(own, environment, limit);
    } catch (const Error& exception) {
      roll_call.announce(exception);
      throw;
    } catch (const std::exception& exception) {
      error = exception.what();
    }
    const std::vector<std::string> errors = roll_call.exchange(error);
    const auto failed = std::ranges::find_if(errors, [](const std::string& each) { return !each.empty(); });
    if (failed == errors.end()) {
      group->setTimeout(clamp_timeout(timeout) + kGlooAfterGuard);
      return group;
    }
    const auto rank = static_cast<int>(failed - errors.begin());
    if (limit >= longest)
      throw RendezvousError(fmt::format("rank {} did not connect through gloo: {}", rank, *failed),
                            {.rank = rank, .call = "rendezvous"});
  }
}

class GlooBackend final : public ForwardingBackend {
 public:
  GlooBackend(Ptr<GlooGroup> group, std::unique_ptr<GroupGuard> guard)
      : ForwardingBackend(group, at::kCPU, std::move(guard)), group_(std::move(group)) {
    guard_->start({.abort = [this] { group_->end_connections(); }});
  }
  ~GlooBackend() override {
    guard_->stop();
    if (!guard_->failed()) return;
    group_->end_connections();
    // The destructor waits for gloo's threads, which may be stuck.
    std::thread([group = group_]() mutable {
      while (group.use_count() > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      group.reset();
    }).detach();
  }

  Ptr<Backend> subgroup(const Ptr<c10d::Store>& store, const std::vector<int>& /*ranks*/,
                        const LaunchEnvironment& part) override {
    return create_gloo_backend(store, part, guard_->timeout());
  }
  void set_elastic(const Ptr<c10d::Store>& store, const LaunchEnvironment& /*environment*/) override {
    // A rank waits for the end of the others' calls, at most until gloo's timeout.
    const auto timeout = clamp_timeout(guard_->timeout()) + 2 * kGlooAfterGuard;
    start_agreement(connect_engine(store, rank_, size_, timeout, /*first_rank=*/0));
  }
  bool scatters_by_all_reduce() const noexcept override { return true; }

 private:
  std::function<bool()> end_of(const WorkPtr& work) override {
    return [this, weak = c10::weak_intrusive_ptr<c10d::Work>(work)] {
      const WorkPtr owned = weak.lock();  // gloo's queue owns the work until its end.
      return !owned || owned->isCompleted() || (guard_->failed() && group_->is_stuck());
    };
  }
  WorkPtr ending(WorkPtr work) override {
    return c10::make_intrusive<GlooWork>(std::move(work), rank_, [group = group_, guard = guard_.get()] {
      return guard->failed() && group->is_stuck();
    });
  }

  Ptr<ForwardingBackend> reconnect(const Ptr<c10d::Store>& store, const LaunchEnvironment& place, int name,
                                   const std::function<void()>& /*check*/) override {
    auto guard = std::make_unique<GroupGuard>(store, place, guard_->timeout(), name);
    return c10::make_intrusive<GlooBackend>(connect_gloo(store, place, guard_->timeout(), kReconnectLimit),
                                            std::move(guard));
  }

  const Ptr<GlooGroup> group_;
};

}  // namespace

c10::intrusive_ptr<ForwardingBackend> create_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                          const LaunchEnvironment& environment,
                                                          std::chrono::milliseconds timeout, int name) {
  auto guard = std::make_unique<GroupGuard>(store, environment, timeout, name < 0 ? environment.rank : name);
  return c10::make_intrusive<GlooBackend>(connect_gloo(store, environment, timeout, timeout), std::move(guard));
}

}  // namespace ddpkit

#else

namespace ddpkit {

c10::intrusive_ptr<ForwardingBackend> create_gloo_backend(const c10::intrusive_ptr<c10d::Store>&,
                                                          const LaunchEnvironment&, std::chrono::milliseconds, int) {
  throw InvalidArgument(
      "this build of ddpkit has no gloo backend: install gloo's headers (Debian and Ubuntu: libgloo-dev) and configure "
      "with -DDDPKIT_GLOO=ON");
}

}  // namespace ddpkit
#endif
