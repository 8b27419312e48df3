#include "comm/agreement.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <ddpkit/error.h>

#include "comm/master_address.h"
#include "comm/shm_rendezvous.h"
#include "comm/sockets.h"
#include "comm/store/keyed_store.h"
#include "comm/store/store_server.h"
#include "comm/timeout.h"

namespace ddpkit {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

namespace {

/// The backend may fail before the guard or the engine, which know the failed rank.
constexpr std::chrono::seconds kGuardLimit(5);
/// How long the calls of a failed group may continue. gloo's own timeout comes 2 s after the guard's.
constexpr std::chrono::seconds kAfterTimeout(5);
constexpr std::chrono::microseconds kNap(50);

}  // namespace

Agreement::Agreement(std::shared_ptr<shm::Engine> engine, GroupGuard& guard, std::shared_ptr<void> server)
    : engine_(std::move(engine)), guard_(guard), server_(std::move(server)) {
  // The guard ends the collectives of all ranks. Otherwise this rank could wait for a rank that waits for the lost one.
  engine_->set_elastic([&guard](FailureKind kind, const std::string& text, std::optional<int> failed_rank) {
    guard.fail({.kind = kind, .failed_rank = failed_rank.value_or(-1), .text = text});
  });
}

Agreement::~Agreement() { engine_->set_elastic(); }

std::uint64_t Agreement::add(WorkPtr work, std::function<bool()> has_ended) {
  const std::lock_guard lock(mutex_);
  calls_.push_back({.work = std::move(work), .has_ended = std::move(has_ended), .barrier = nullptr});
  return completed_ + calls_.size() - 1;
}

void Agreement::run(const std::function<void()>& call) {
  try {
    call();
  } catch (...) {
    const milliseconds limit = guard_.timeout() + kAfterTimeout;
    if (!guard_.is_idle(limit))
      throw Timeout(
          fmt::format("rank {} timed out: after a failure of the group, its calls did not end within {:.1f} s",
                      engine_->name(), std::chrono::duration<double>(limit).count()),
          {.rank = engine_->name(), .call = "collective"});
    order_after_calls();
    throw;
  }
}

/// On a device, the current stream waits for the calls that have ended, also for those that nobody has waited for.
void Agreement::order_after_calls() {
  for (const Call& call : calls_) {
    try {
      if (call.work->isCompleted()) call.work->wait(kNoTimeout);
    } catch (const std::exception&) {
      // The call has failed.
    }
  }
}

void Agreement::throw_if_failed() {
  engine_->check();
  if (!guard_.failed()) return;
  try {
    guard_.throw_failure();
  } catch (const Timeout& error) {
    engine_->stop(FailureKind::kTimeout, error.what(), error.context().rank);
  } catch (const PeerLost& error) {
    const bool is_own = error.context().rank == engine_->name();
    engine_->stop(is_own ? FailureKind::kAborted : FailureKind::kPeerLost, error.what(), error.context().rank);
  }
}

void Agreement::find_failure(const std::string& reason) {
  const auto is_known = [this] {
    engine_->check_ranks();
    return guard_.failed();
  };
  if (!poll_until(Clock::now() + kGuardLimit, is_known)) return engine_->abort(reason);
  throw_if_failed();
}

void Agreement::fail(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  run([&] { find_failure(reason); });
}

void Agreement::wait_for_work(Call& call, milliseconds timeout) {
  try {
    call.work->wait(timeout);
  } catch (const std::exception& error) {
    find_failure(error.what());
    throw;
  }
  // On a device, wait() returns before the end. After an abort, the device continues with invalid data.
  while (!call.has_ended() && !guard_.failed()) std::this_thread::sleep_for(kNap);
  throw_if_failed();
}

void Agreement::post_barrier(Call& call) {
  call.barrier = engine_->post({.kind = shm::CollectiveKind::kBarrier, .recorded = false});
}

void Agreement::remove_first() {
  calls_.pop_front();
  ++completed_;
}

void Agreement::wait(std::uint64_t number, milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  run([&] {
    while (completed_ <= number) {
      Call& call = calls_.front();
      if (!call.barrier) {
        throw_if_failed();
        wait_for_work(call, timeout);
        post_barrier(call);
      }
      engine_->wait(call.barrier);
      remove_first();
    }
  });
}

bool Agreement::test(std::uint64_t number) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;  // Another thread waits.
  try {
    while (completed_ <= number) {
      Call& call = calls_.front();
      if (!call.barrier) {
        if (!call.has_ended()) return guard_.failed();
        if (guard_.failed() || call.work->exception()) return true;
        post_barrier(call);
      }
      if (!engine_->test(call.barrier)) return false;
      remove_first();
    }
  } catch (const std::exception&) {
    // wait() throws it.
  }
  return true;
}

void Agreement::check() {
  const std::lock_guard lock(mutex_);
  run([this] { throw_if_failed(); });
}

std::string Agreement::end(milliseconds limit) {
  try {
    engine_->set_timeout(limit);
    std::uint64_t next = 0;
    {
      const std::lock_guard lock(mutex_);
      next = completed_ + calls_.size();
    }
    if (next != 0) wait(next - 1, limit);
    return {};
  } catch (const std::exception& error) {
    return error.what();
  }
}

namespace {

/// Waits for keys only while all ranks of an engine run.
class WatchedStore final : public c10d::PrefixStore {
 public:
  WatchedStore(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<shm::Engine> engine)
      : PrefixStore(prefix, std::move(store)), engine_(std::move(engine)) {}

  bool check(const std::vector<std::string>& keys) override {
    engine_->check_ranks();
    return PrefixStore::check(keys);
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    const auto deadline = Clock::now() + (timeout == kNoTimeout ? clamp_timeout(milliseconds::max()) : timeout);
    if (!poll_until(deadline, [&] { return check(keys); })) PrefixStore::wait(keys, milliseconds(1));  // Throws.
  }
  std::vector<std::uint8_t> get(const std::string& key) override {
    wait({key});
    return PrefixStore::get(key);
  }
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys);
    return PrefixStore::multiGet(keys);
  }

 private:
  const std::shared_ptr<shm::Engine> engine_;
};

/// What the other ranks need to join the store of rank 0.
struct Pass {
  store::Digest key{};
  std::uint16_t port = 0;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> watch(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store,
                                      std::shared_ptr<shm::Engine> engine) {
  return c10::make_intrusive<WatchedStore>(prefix, std::move(store), std::move(engine));
}

std::shared_ptr<shm::Engine> connect_with_new(const std::shared_ptr<shm::Engine>& engine,
                                              const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                              const std::vector<int>& names) {
  auto next = connect_engine(watch("shm", store, engine), rank, static_cast<int>(names.size()),
                             std::min<milliseconds>(engine->timeout(), kReconnectLimit), names[0], names);
  next->set_timeout(engine->timeout());
  next->set_elastic();
  return next;
}

RemainingStore connect_remaining(const std::shared_ptr<shm::Engine>& engine) {
  constexpr const char* kRun = "remaining";
  const std::string address = usable_loopback("127.0.0.1");
  RemainingStore result;
  Pass pass;
  const bool serves = engine->rank() == 0;
  if (serves) {
    int listener = -1;
    const auto port = listen_on(address, listener);
    if (!port) throw Error(fmt::format("the store cannot be served on {}: {}", address, std::strerror(errno)));
    pass = {.key = store::random_digest(), .port = *port};
    result.server = std::make_shared<store::StoreServer>(listener, pass.key, kRun);
  }
  engine->run({.kind = shm::CollectiveKind::kBroadcast,
               .input = serves ? &pass : nullptr,
               .output = &pass,
               .numel = sizeof pass,
               .recorded = false});
  LaunchEnvironment place;
  place.master_addr = address;
  place.master_port = pass.port;
  const auto check = [&] { engine->check_ranks(); };
  auto store = c10::make_intrusive<store::KeyedStore>(
      store::StorePlace{.address = wait_for_master(place, "the lowest remaining rank", kReconnectLimit, check),
                        .name = fmt::format("{}:{}", address, pass.port),
                        .key = pass.key,
                        .run = kRun},
      kReconnectLimit, /*grace=*/kReconnectLimit, check);
  result.store = watch("remaining", std::move(store), engine);
  return result;
}

}  // namespace ddpkit
