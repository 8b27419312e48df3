#include "comm/shm/peers.h"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "comm/trace/event_ring.h"

namespace ddpkit::shm {
namespace {

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::milliseconds limit) {
  const timespec nap{0, static_cast<long>(std::chrono::nanoseconds(limit).count())};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &nap, nullptr, 0);
}

void futex_wake(std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// The last step of Peers::join(). In the first step, a rank has described its memory.
constexpr std::uint32_t kJoined = 2;

bool membarrier(int command) { return ::syscall(SYS_membarrier, command, 0, 0) == 0; }

/// Between publishing a count and checking which peers sleep, and between start_sleep() and reading the counts.
void full_barrier() {
#if defined(__SANITIZE_THREAD__)
  static std::atomic<int> anything{0};  // ThreadSanitizer does not support fences.
  anything.exchange(1);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace

std::exception_ptr make_error(FailureKind kind, const std::string& text, Error::Context context) {
  switch (kind) {
    case FailureKind::kMismatch:
      return std::make_exception_ptr(CollectiveMismatch(text, std::move(context)));
    case FailureKind::kTimeout:
      return std::make_exception_ptr(Timeout(text, std::move(context)));
    default:
      return std::make_exception_ptr(PeerLost(text, std::move(context)));
  }
}

Mapping create_control(int world_size) {
  Mapping control = Mapping::create("control", control_bytes(world_size));
  new (control.data()) ControlHead{kLayout, static_cast<std::uint32_t>(world_size)};
  for (int r = 0; r < world_size; ++r) new (rank_blocks(control.data()) + r) RankBlock;
  return control;
}

Peers::Peers(Mapping control, int rank, std::vector<int> pids, std::chrono::milliseconds timeout,
             std::vector<int> names)
    : rank_(rank),
      world_size_(static_cast<int>(pids.size())),
      pids_(std::move(pids)),
      names_(std::move(names)),
      control_(std::move(control)),
      head_(*reinterpret_cast<ControlHead*>(control_.data())),
      blocks_(rank_blocks(control_.data())) {
  try {
    if (world_size_ > 1) join(timeout);
  } catch (const PeerLost& error) {
    publish_failure(FailureKind::kPeerLost, error.what(), error.context().rank);
    throw;
  } catch (const Timeout& error) {
    publish_failure(FailureKind::kTimeout, error.what(), error.context().rank);
    throw RendezvousError(error.what(), error.context());
  } catch (const std::exception& error) {
    publish_failure(FailureKind::kAborted, error.what(), named(rank_));
    throw;
  }
  control_.close_descriptor();
}

void Peers::join(std::chrono::milliseconds timeout) {
  // The control memory and its layout exist. Each rank fills in its block.
  const auto ranks = static_cast<std::size_t>(world_size_);
  for (const int pid : pids_) watches_.emplace_back(pid);
  staging_.resize(ranks);
  Mapping& staging = staging_[static_cast<std::size_t>(rank_)];
  staging = Mapping::create(fmt::format("staging-{}", rank_), kSlots * kSlotStride);
  channels_.resize(ranks);
  Mapping& channels = channels_[static_cast<std::size_t>(rank_)];
  const std::size_t channel_bytes = sizeof(ChannelBlock) * ranks;
  channels = Mapping::create(fmt::format("channels-{}", rank_), channel_bytes, Mapping::Populate::kLazy);
  RankBlock& self = own();
  self.staging_fd = staging.descriptor();
  self.channels_fd = channels.descriptor();
  self.has_membarrier = membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) ? 1 : 0;
  self.life = life_page();
  self.stack_signal = EventRing::of_process().stack_signal();
  cpu_set_t cores;
  CPU_ZERO(&cores);
  ::sched_getaffinity(0, sizeof cores, &cores);
  std::memcpy(self.cores.data(), &cores, std::min(sizeof cores, sizeof self.cores));
  self.joined.store(1);

  const auto deadline = std::chrono::steady_clock::now() + timeout;
  wait_for_joined(1, timeout, deadline);
  cpu_set_t all;
  CPU_ZERO(&all);
  has_membarrier_ = true;
  for (int r = 0; r < world_size_; ++r) {
    const auto index = static_cast<std::size_t>(r);
    watches_[index] = ProcessWatch(pid(r), block(r).life);
    if (r != rank_) {
      staging_[index] = open(r, block(r).staging_fd, kSlots * kSlotStride, Mapping::Populate::kEager);
      channels_[index] = open(r, block(r).channels_fd, channel_bytes, Mapping::Populate::kLazy);
    }
    cpu_set_t theirs;
    CPU_ZERO(&theirs);
    std::memcpy(&theirs, block(r).cores.data(), std::min(sizeof theirs, sizeof self.cores));
    CPU_OR(&all, &all, &theirs);
    has_membarrier_ = has_membarrier_ && block(r).has_membarrier != 0;
  }
  core_each_ = CPU_COUNT(&all) >= world_size_;
  self.joined.store(kJoined);
  wait_for_joined(kJoined, timeout, deadline);
  staging.close_descriptor();
  channels.close_descriptor();
}

void Peers::wait_for_joined(std::uint32_t step, std::chrono::milliseconds timeout,
                            std::chrono::steady_clock::time_point deadline) const {
  for (int r = 0; r < world_size_; ++r) {
    while (block(r).joined.load() < step) {
      for (int other = 0; other < world_size_; ++other) throw_if_missing(other);
      if (std::chrono::steady_clock::now() > deadline)
        throw Timeout(fmt::format("rank {} timed out: rank {} did not join the shm group of {} ranks within {:.1f} s",
                                  named(rank_), named(r), world_size_, std::chrono::duration<double>(timeout).count()),
                      {.rank = named(r), .call = "rendezvous"});
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

/// A rank that fails or ends in the first step prevents the second step of all others. So all ranks join, or none.
void Peers::throw_if_missing(int rank) const {
  const auto is_meeting = [&] { return block(rank).joined.load() < kJoined; };
  if (!is_meeting()) return;
  throw_failure_of(rank);
  if (watches_[static_cast<std::size_t>(rank)].alive() || !is_meeting()) return;
  throw_failure_of(rank);  // The rank may have published a failure between the two checks.
  throw PeerLost(fmt::format("rank {} (pid {}) ended while the ranks were meeting", named(rank), pid(rank)),
                 {.rank = named(rank), .call = "rendezvous"});
}

std::vector<std::byte*> Peers::staging_slots() const {
  std::vector<std::byte*> slots;
  for (const Mapping& mapping : staging_) slots.push_back(mapping.data());
  return slots;
}

std::vector<ChannelBlock*> Peers::channels() const {
  std::vector<ChannelBlock*> channels;
  // New pages are zero: the initial state of a channel.
  for (const Mapping& mapping : channels_) channels.push_back(reinterpret_cast<ChannelBlock*>(mapping.data()));
  return channels;
}

Mapping Peers::open(int rank, int fd, std::size_t bytes, Mapping::Populate populate) const {
  // A rank that fails publishes the failure before it closes its memory.
  const auto has_closed = [&] { return block(rank).failure.load() != 0; };
  try {
    return Mapping::open({.rank = named(rank), .pid = pid(rank)}, fd, bytes, populate, has_closed);
  } catch (const Error&) {
    throw_failure_of(rank);
    throw;
  }
}

void Peers::notify_sleepers() noexcept {
  if (!published_) return;
  published_ = false;
  if (has_membarrier_) {
    std::atomic_signal_fence(std::memory_order_seq_cst);
  } else {
    full_barrier();
  }
  wake_others();
}

std::uint32_t Peers::start_sleep() const noexcept {
  const std::uint32_t wake_word = own().wake_word.load();
  own().sleeping.fetch_add(1);
  if (has_membarrier_) {
    membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED);
  } else {
    full_barrier();
  }
  return wake_word;
}

void Peers::sleep(std::uint32_t wake_word, std::chrono::milliseconds limit) const noexcept {
  futex_wait(own().wake_word, wake_word, limit);
}

void Peers::wake(int rank) const noexcept {
  if (block(rank).sleeping.load() == 0) return;
  block(rank).wake_word.fetch_add(1);
  futex_wake(block(rank).wake_word);
}

void Peers::wake_others() const noexcept {
  for (int r = 0; r < world_size_; ++r) {
    if (r != rank_) wake(r);
  }
}

void Peers::publish_failure(FailureKind kind, const std::string& text, std::optional<int> failed_rank,
                            std::uint64_t sequence) const noexcept {
  RankBlock& self = own();
  if (self.failure.load() != 0) return;
  const std::size_t length = std::min(text.size(), self.failure_text.size() - 1);
  std::memcpy(self.failure_text.data(), text.data(), length);
  self.failed_rank = failed_rank.value_or(-1);
  self.failed_sequence = sequence;
  self.failure.store(static_cast<std::uint32_t>(kind));
  head_.failures.fetch_add(1);
  wake_others();
}

std::optional<Peers::Failure> Peers::failure_of(int rank) const {
  const RankBlock& theirs = block(rank);
  const auto kind = static_cast<FailureKind>(theirs.failure.load());
  if (kind == FailureKind::kNone) return std::nullopt;
  const std::string text(theirs.failure_text.data(), strnlen(theirs.failure_text.data(), theirs.failure_text.size()));
  // Only the rank that aborts publishes kAborted.
  if (kind == FailureKind::kAborted)
    return Failure{FailureKind::kPeerLost, fmt::format("rank {} aborted: {}", named(rank), text), named(rank),
                   theirs.failed_sequence};
  return Failure{kind, text, theirs.failed_rank >= 0 ? std::optional<int>(theirs.failed_rank) : std::nullopt,
                 theirs.failed_sequence};
}

void Peers::throw_failure_of(int rank) const {
  if (const auto failure = failure_of(rank))
    std::rethrow_exception(
        make_error(failure->kind, failure->text, {.rank = failure->failed_rank, .call = "rendezvous"}));
}

void Peers::leave(std::uint64_t sequence) const noexcept {
  if (own().failure.load() == 0) own().failed_sequence = sequence;
  own().left.store(1);
  wake_others();
}

std::uint64_t Peers::completed_by(int rank) const noexcept {
  const RankBlock& theirs = block(rank);
  return theirs.failure.load() != 0 || theirs.left.load() != 0 ? theirs.failed_sequence : 0;
}

int Peers::ended() const noexcept {
  int ended = 0;
  for (int r = 0; r < world_size_; ++r) ended += block(r).failure.load() != 0 || block(r).left.load() != 0 ? 1 : 0;
  return ended;
}

std::vector<int> Peers::lost() const {
  std::vector<int> lost;
  for (int r = 0; r < world_size_; ++r) {
    if (r != rank_ && has_ended(r)) lost.push_back(r);
  }
  return lost;
}

void Peers::request_stack(int rank) const noexcept {
  const int signal = block(rank).stack_signal;
  if (signal != 0 && !EventRing::of_process().is_read()) ::kill(pid(rank), signal);
}

}  // namespace ddpkit::shm
