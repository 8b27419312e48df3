// Waiting: spins, sleeps, and progresses the other groups of the process.
#include <sched.h>

#include <thread>

#include "comm/shm/engine.h"
#include "comm/timeout.h"

namespace ddpkit::shm {
namespace {

using std::chrono::milliseconds;

/// Maximum sleep before a waiting rank checks that its peers are alive.
constexpr milliseconds kNap(50);
/// Maximum sleep while another group of the process, whose `wake_word` does not wake this rank, has operations in
/// progress.
constexpr milliseconds kShortNap(1);
/// Turns between two checks of the other groups.
constexpr int kLookAround = 32;
/// Turns that a rank with a separate core spins before it sleeps: about 300 us. This is longer than the delay of a peer
/// by an interrupt or another process. Sleeping through such delays costs both ranks more than it saves: the core of a
/// virtual machine takes 12 us to wake another one. With 50 us, the mean of a 0.3 ms step was 7 % longer, and its 90th
/// percentile 14 %. With 1 ms it was not shorter.
constexpr int kSpinTurns = 6000;
/// Of these turns, the first do not pause: a small collective completes in this time.
constexpr int kHotTurns = 100;
/// Turns with more ranks than cores: a peer needs the core.
constexpr int kYieldTurns = 4;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // `yield` does nothing on most processors.
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
    if (!pending->finished) check_peers(lock, pending->message, [&] { return pending->finished; });
  }
  pending->throw_if_failed();
  return pending->finished;
}

void Engine::wait(const PendingHandle& pending, milliseconds timeout) {
  std::unique_lock lock(mutex_);
  settle(lock);
  if (!pending->finished)
    wait_until(lock, timeout.count() > 0 ? clamp_timeout(timeout) : timeout_, pending->message,
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
        const int ended = peers_.ended();
        const PendingHandle oldest = background_.front().pending;
        check_peers(lock, oldest->message, [&] { return oldest->finished; });
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
  const int turns_awake = peers_.core_each() ? kSpinTurns : kYieldTurns;
  std::optional<Clock::time_point> start;  // Reads the clock only after a long wait.
  for (int turn = 0;;) {
    if (!failure_ && progress()) turn = 0;
    settle(lock);
    if (done()) return;
    throw_if_failed();
    if (turn++ < turns_awake) {
      if (peers_.core_each() && turn < kHotTurns) continue;
      lock.unlock();
      if (turn % kLookAround == 0) Engines::all().progress_others(this);
      if (peers_.core_each()) {
        pause();
      } else {
        ::sched_yield();
      }
      lock.lock();
      continue;
    }
    if (!start) {
      start = Clock::now();
      if (const Operation* oldest = collectives_.oldest(); oldest && !message) ring_.waits(oldest->event);
    }
    const int ended = peers_.ended();
    check_peers(lock, message, done);
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
  const std::uint32_t wake_word = peers_.start_sleep();
  if (!progress() && peers_.ended() == ended) {
    lock.unlock();
    peers_.sleep(wake_word, others_busy ? kShortNap : kNap);
    lock.lock();
  }
  peers_.end_sleep();
}

bool Engine::progress_from_outside() noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return true;  // Its own thread makes progress.
  if (failure_ || (!collectives_.oldest() && mailbox_.idle())) return false;
  try {
    progress();
  } catch (const std::exception&) {
    return false;  // Kept in failure_ for the next call of that group.
  }
  // The group's own calls run settle(): a deleter may destroy a group, and the list of groups is locked here.
  return true;
}

}  // namespace ddpkit::shm
