// How a rank waits: spinning, sleeping, telling sleepers, and moving the process's other groups on meanwhile.
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <thread>

#include "comm/shm/engine.h"
#include "comm/shm/engines.h"
#include "comm/shm/operation.h"
#include "comm/timeout.h"

namespace ddpkit::shm {
namespace {

using std::chrono::milliseconds;

/// Longest sleep before a waiting rank looks whether its peers still live.
constexpr milliseconds kNap(50);
/// The same while another of the process's groups, whose bell does not wake this rank, has something under way.
constexpr milliseconds kShortNap(1);
/// Turns between two looks at the other groups.
constexpr int kLookAround = 32;
/// Turns of a waiting rank that has a core to itself: about 300 us, far shorter than what anybody would notice of a
/// core taken from others. Longer than an interrupt or another process holds up a peer: to sleep through these costs
/// both more (a virtual machine's core takes 12 us to wake another one) than it spares. Of a step of 0.3 ms, 50 us of
/// spinning left the mean 7 % and the 90th percentile 14 % longer; 1 ms gained nothing more.
constexpr int kSpinTurns = 6000;
/// Of these, the first do not even pause between two looks: a small collective is over by then.
constexpr int kHotTurns = 100;
/// Turns when there are more ranks than cores: the core is wanted by a peer.
constexpr int kYieldTurns = 4;

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, milliseconds limit) {
  const timespec nap{0, static_cast<long>(std::chrono::nanoseconds(limit).count())};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &nap, nullptr, 0);
}

void futex_wake(std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// Between raising a count and looking who sleeps; sleep() has its counterpart.
void full_barrier() {
#if defined(__SANITIZE_THREAD__)
  static std::atomic<int> anything{0};  // ThreadSanitizer knows no fences.
  anything.exchange(1);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace

bool Engine::test(const PendingHandle& pending) {
  std::unique_lock lock(mutex_);
  settle(lock);
  if (!pending->finished) {
    throw_if_failed();
    progress();
    settle(lock);
    if (!pending->finished) check_peers(pending->message);
    settle(lock);
  }
  pending->throw_if_failed();
  return pending->finished;
}

void Engine::wait(const PendingHandle& pending, milliseconds timeout) {
  std::unique_lock lock(mutex_);
  settle(lock);
  if (!pending->finished)
    wait_until(lock, timeout.count() > 0 ? bounded(timeout) : timeout_, pending->message,
               [&] { return pending->finished; });
  pending->throw_if_failed();
}

void Engine::finish_in_background(PendingHandle pending, std::function<void(std::exception_ptr)> then) {
  {
    const std::lock_guard lock(mutex_);
    background_.push_back({std::move(pending), std::move(then)});
    if (!background_thread_.joinable()) background_thread_ = std::thread([this] { run_background(); });
  }
  background_wanted_.notify_all();
}

void Engine::run_background() {
  const auto ended = ended_by_callback_;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (background_.empty()) {
      background_wanted_.wait(lock);
      continue;
    }
    std::list<Background> over;
    std::exception_ptr failure;
    try {
      throw_if_failed();
      progress();
      settle(lock);
      for (auto at = background_.begin(); at != background_.end();) {
        const auto next = std::next(at);
        if (at->pending->finished) over.splice(over.end(), background_, at);
        at = next;
      }
      if (over.empty()) {
        const int ended = ended_peers();
        check_peers(background_.front().pending->message);
        sleep(lock, false, ended);
      }
    } catch (const std::exception&) {
      failure = std::current_exception();
      over.splice(over.end(), background_);
    }
    settle(lock);
    if (over.empty()) continue;
    lock.unlock();
    for (const Background& entry : over) {
      if (entry.then) entry.then(entry.pending->finished ? entry.pending->failure : failure);
    }
    over.clear();
    if (*ended) return;
    lock.lock();
  }
}

void Engine::wait_until(std::unique_lock<std::mutex>& lock, milliseconds timeout, const Message* message,
                        const std::function<bool()>& done) {
  const int turns_awake = core_each_ ? kSpinTurns : kYieldTurns;
  std::optional<Clock::time_point> start;  // The clock is read only by those who wait long.
  for (int turn = 0;;) {
    throw_if_failed();
    if (progress()) turn = 0;
    settle(lock);
    if (done()) return;
    if (turn++ < turns_awake) {
      if (core_each_ && turn < kHotTurns) continue;
      lock.unlock();
      if (turn % kLookAround == 0) Engines::all().progress_others(this);
      if (core_each_) {
        pause();
      } else {
        ::sched_yield();
      }
      lock.lock();
      continue;
    }
    if (!start) {
      start = Clock::now();
      if (!message && !operations_.empty()) recorder_.waits(operations_.front()->record);
    }
    const int ended = ended_peers();
    check_peers(message);
    settle(lock);
    if (done()) return;
    const auto waited = Clock::now() - *start;
    if (waited >= timeout) throw_timeout(message, std::chrono::duration_cast<milliseconds>(waited), timeout);
    lock.unlock();
    const bool others_busy = Engines::all().progress_others(this);
    lock.lock();
    sleep(lock, others_busy, ended);
  }
}

void Engine::sleep(std::unique_lock<std::mutex>& lock, bool others_busy, int ended) {
  RankBlock& self = block(rank_);
  // A peer raises a count or ends its group, then looks at `sleeping`; here `sleeping` is set, then the counts and the
  // ends are looked at. In whatever order these four happen, either this rank sees the change or the peer rings.
  const std::uint32_t bell = self.bell.load();
  self.sleeping.fetch_add(1);
  if (!progress() && ended_peers() == ended) {
    lock.unlock();
    futex_wait(self.bell, bell, others_busy ? kShortNap : kNap);
    lock.lock();
  }
  self.sleeping.fetch_sub(1);
}

bool Engine::progress_from_outside() noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return true;  // Its own thread is at it.
  if (failure_ || (operations_.empty() && (!mailbox_ || mailbox_->idle()))) return false;
  try {
    progress();
  } catch (const std::exception&) {
    return false;  // Kept in failure_, for whoever uses that group next.
  }
  // settle() is left to the group's own calls: a deleter may destroy a group, and the list of groups is locked here.
  return true;
}

void Engine::raise(std::atomic<std::uint64_t>& count, std::uint64_t value) noexcept {
  count.store(value, std::memory_order_release);
  raised_ = true;
}

/// Wakes the peers that sleep, once for all the counts that a turn has raised: the barrier costs more than the stores.
void Engine::tell_peers() noexcept {
  if (!raised_) return;
  raised_ = false;
  full_barrier();
  ring_sleepers();
}

void Engine::ring(int rank) noexcept {
  if (block(rank).sleeping.load() == 0) return;
  block(rank).bell.fetch_add(1);
  futex_wake(block(rank).bell);
}

void Engine::ring_sleepers() noexcept {
  for (int r = 0; r < world_size_; ++r) {
    if (r != rank_) ring(r);
  }
}

}  // namespace ddpkit::shm
