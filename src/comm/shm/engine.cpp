#include "engine.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstring>
#include <set>
#include <thread>

#include <fmt/format.h>

#include <ddpkit/comm/error.h>

#include "operation.h"

namespace ddpkit::shm {
namespace {

using std::chrono::milliseconds;

/// Longest sleep before a waiting rank looks whether its peers still live.
constexpr milliseconds kNap(50);
/// The same while another of the process's groups, whose bell does not wake this rank, has something under way.
constexpr milliseconds kShortNap(1);
/// Turns between two looks at the other groups.
constexpr int kLookAround = 32;
/// Turns of a waiting rank that has a core to itself: about 50 us, longer than a small collective, far shorter than what
/// anybody would notice of a core taken from others.
constexpr int kSpinTurns = 1000;
/// Turns when there are more ranks than cores: the core is wanted by a peer.
constexpr int kYieldTurns = 4;

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, milliseconds limit) {
  const timespec nap{0, static_cast<long>(std::chrono::nanoseconds(limit).count())};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &nap, nullptr, 0);
}

void futex_wake(std::atomic<std::uint32_t>& word) { ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

/// The engines of this process.
class Engines {
 public:
  static Engines& all() {
    static auto* engines = new Engines;  // Never destroyed: a group may be the last thing that a program lets go of.
    return *engines;
  }
  void add(Engine* engine) {
    const std::lock_guard lock(mutex_);
    engines_.push_back(engine);
    count_groups();
  }
  void remove(Engine* engine) {
    const std::lock_guard lock(mutex_);
    std::erase(engines_, engine);
    count_groups();
  }
  /// Whether any group but that of `self` has something under way, after moving it on. Ranks of one group in one process
  /// are threads, each of which moves itself on.
  bool progress_others(const Engine* self) {
    if (groups_.load(std::memory_order_relaxed) < 2) return false;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return true;
    bool busy = false;
    for (Engine* engine : engines_) busy |= engine->group() != self->group() && engine->progress_from_outside();
    return busy;
  }

 private:
  void count_groups() {
    std::set<const void*> groups;
    for (const Engine* engine : engines_) groups.insert(engine->group());
    groups_ = groups.size();
  }

  std::mutex mutex_;
  std::vector<Engine*> engines_;
  std::atomic<std::size_t> groups_ = 0;
};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace

Engine::Engine(Mapping control, int rank, int world_size, milliseconds timeout)
    : rank_(rank), world_size_(world_size), timeout_(timeout), control_(std::move(control)) {
  blocks_ = reinterpret_cast<RankBlock*>(control_.data() + sizeof(ControlHead));
  parts_.resize(static_cast<std::size_t>(world_size_));
  if (world_size_ > 1) join();
  Engines::all().add(this);
  control_.close_descriptor();
}

void Engine::join() {
  // The first to come has made the memory and the layout; everybody fills in its own block.
  staging_.resize(static_cast<std::size_t>(world_size_));
  watches_.resize(static_cast<std::size_t>(world_size_));
  Mapping& own = staging_[static_cast<std::size_t>(rank_)];
  own = Mapping::create(fmt::format("staging-{}", rank_), kSlots * kSlotBytes);
  RankBlock& self = block(rank_);
  channels_.resize(static_cast<std::size_t>(world_size_));
  const std::size_t channel_bytes = sizeof(ChannelBlock) * static_cast<std::size_t>(world_size_);
  Mapping& own_channels = channels_[static_cast<std::size_t>(rank_)];
  own_channels = Mapping::create(fmt::format("channels-{}", rank_), channel_bytes, Mapping::Fill::kOnTouch);
  self.channels_fd = own_channels.descriptor();
  self.pid = ::getpid();
  self.staging_fd = own.descriptor();
  cpu_set_t cores;
  CPU_ZERO(&cores);
  ::sched_getaffinity(0, sizeof cores, &cores);
  std::memcpy(self.cores.data(), &cores, std::min(sizeof cores, sizeof self.cores));
  self.joined.store(1);

  const auto deadline = Clock::now() + timeout_;
  const auto wait_for_all = [&](std::uint32_t step) {
    for (int r = 0; r < world_size_; ++r) {
      while (block(r).joined.load() < step) {
        const bool known = block(r).joined.load() > 0;
        if (known && !watches_[static_cast<std::size_t>(r)].alive() && block(r).joined.load() < step)
          throw PeerLost(fmt::format("rank {} (pid {}) ended while the ranks were meeting", r, block(r).pid),
                         {.rank = r, .call = "rendezvous"});
        if (Clock::now() > deadline)
          throw RendezvousError(
              fmt::format("rank {} did not join the shm group of {} ranks in time", r, world_size_),
              {.rank = r, .call = "rendezvous"});
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      if (step == 1) watches_[static_cast<std::size_t>(r)] = ProcessWatch(block(r).pid);
    }
  };
  wait_for_all(1);
  cpu_set_t all;
  CPU_ZERO(&all);
  std::vector<ChannelBlock*> channels;
  for (int r = 0; r < world_size_; ++r) {
    const auto index = static_cast<std::size_t>(r);
    if (r != rank_) {
      staging_[index] = Mapping::open(block(r).pid, block(r).staging_fd, kSlots * kSlotBytes);
      channels_[index] = Mapping::open(block(r).pid, block(r).channels_fd, channel_bytes, Mapping::Fill::kOnTouch);
    }
    // Fresh pages are zeroes, which is what a channel starts with.
    channels.push_back(reinterpret_cast<ChannelBlock*>(channels_[index].data()));
    cpu_set_t theirs;
    CPU_ZERO(&theirs);
    std::memcpy(&theirs, block(r).cores.data(), std::min(sizeof theirs, sizeof self.cores));
    CPU_OR(&all, &all, &theirs);
  }
  spin_turns_ = CPU_COUNT(&all) >= world_size_ ? kSpinTurns : 0;
  self.joined.store(2);
  wait_for_all(2);
  own.close_descriptor();
  own_channels.close_descriptor();
  mailbox_ = std::make_unique<Mailbox>(rank_, std::move(channels));
}

Engine::~Engine() {
  Engines::all().remove(this);
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  background_wanted_.notify_all();
  ring(rank_);
  if (background_thread_.joinable()) background_thread_.join();
  block(rank_).left.store(1);
  ring_sleepers();
}

PendingHandle Engine::post(Request request) {
  auto operation = std::make_shared<Operation>();
  std::unique_lock lock(mutex_);
  throw_if_failed();
  const std::uint64_t sequence = next_sequence_;
  operation->header = {.sequence = sequence,
                       .numel = request.numel,
                       .kind = request.kind,
                       .dtype = static_cast<std::uint8_t>(request.dtype),
                       .reduce_op = static_cast<std::uint8_t>(request.op),
                       .root = request.root,
                       .segment = 0,
                       .offset = 0};
  operation->request = std::move(request);
  if (world_size_ == 1) {
    run_alone(*operation);
    ++next_sequence_;
    return operation;
  }
  locate(*operation);
  // The header of collective s - kMaxOutstanding is overwritten: everybody must have read it.
  if (sequence >= kMaxOutstanding) {
    const std::uint64_t needed = sequence - kMaxOutstanding + 1;
    wait_until(lock, timeout_, nullptr, [&] { return all_reached(&Progress::matched, needed); });
  }
  block(rank_).headers[sequence % kMaxOutstanding] = operation->header;
  operations_.push_back(operation);
  ++next_sequence_;
  raise(mine().posted, next_sequence_);
  progress();
  return operation;
}

void Engine::run_alone(Operation& operation) {
  const Request& request = operation.request;
  const void* input = request.inputs.empty() ? request.input : request.inputs[0];
  void* output = request.outputs.empty() ? request.output : request.outputs[0];
  if (output && output != input) std::memcpy(output, input, operation.bytes());
  if (request.on_finish) request.on_finish();
  operation.request.keep_alive.reset();
  operation.finished = true;
}

MessageHandle Engine::post(MessageHandle message) {
  const std::unique_lock lock(mutex_);
  throw_if_failed();
  try {
    mailbox_->post(message);
  } catch (const CollectiveMismatch& error) {
    fail(FailureKind::kMismatch, error.what(), error.context().rank);
  }
  progress();
  return message;
}

bool Engine::test(const PendingHandle& pending) {
  const std::unique_lock lock(mutex_);
  if (pending->finished) return true;
  throw_if_failed();
  progress();
  if (!pending->finished) check_peers(pending->message);
  return pending->finished;
}

void Engine::wait(const PendingHandle& pending, milliseconds timeout) {
  std::unique_lock lock(mutex_);
  if (pending->finished) return;
  wait_until(lock, timeout.count() > 0 ? timeout : timeout_, pending->message, [&] { return pending->finished; });
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
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (background_.empty()) {
      background_wanted_.wait(lock);
      continue;
    }
    std::list<Background> over;
    try {
      throw_if_failed();
      progress();
      for (auto at = background_.begin(); at != background_.end();) {
        const auto next = std::next(at);
        if (at->pending->finished) over.splice(over.end(), background_, at);
        at = next;
      }
      if (over.empty()) {
        check_peers(background_.front().pending->message);
        sleep(lock, false);
      }
    } catch (const std::exception&) {
      over.splice(over.end(), background_);
    }
    if (over.empty()) continue;
    const std::exception_ptr failure = failure_;
    lock.unlock();
    for (const Background& entry : over) {
      if (entry.then) entry.then(entry.pending->finished ? nullptr : failure);
    }
    over.clear();
    lock.lock();
  }
}

void Engine::wait_until(std::unique_lock<std::mutex>& lock, milliseconds timeout, const Message* message,
                        const std::function<bool()>& done) {
  const int turns_awake = spin_turns_ > 0 ? spin_turns_ : kYieldTurns;
  std::optional<Clock::time_point> start;  // The clock is read only by those who wait long.
  for (int turn = 0;;) {
    throw_if_failed();
    if (progress()) turn = 0;
    if (done()) return;
    if (turn++ < turns_awake) {
      lock.unlock();
      if (turn % kLookAround == 0) Engines::all().progress_others(this);
      if (spin_turns_ > 0) {
        pause();
      } else {
        ::sched_yield();
      }
      lock.lock();
      continue;
    }
    if (!start) start = Clock::now();
    check_peers(message);
    if (done()) return;
    const auto waited = Clock::now() - *start;
    if (waited >= timeout) throw_timeout(message, std::chrono::duration_cast<milliseconds>(waited));
    lock.unlock();
    const bool others_busy = Engines::all().progress_others(this);
    lock.lock();
    sleep(lock, others_busy);
  }
}

void Engine::sleep(std::unique_lock<std::mutex>& lock, bool others_busy) {
  RankBlock& self = block(rank_);
  // A peer raises a count, then looks at `sleeping`; here `sleeping` is set, then the counts are looked at. In whatever
  // order these four happen, either this rank sees the count or the peer rings.
  const std::uint32_t bell = self.bell.load();
  self.sleeping.fetch_add(1);
  if (!progress()) {
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
  return true;
}

void Engine::set_timeout(milliseconds timeout) noexcept {
  const std::lock_guard lock(mutex_);
  timeout_ = timeout;
}

std::uint64_t Engine::sequence() const noexcept {
  const std::lock_guard lock(mutex_);
  return next_sequence_;
}

void Engine::raise(std::atomic<std::uint64_t>& count, std::uint64_t value) noexcept {
  count.exchange(value);  // A full barrier, as sleep() needs.
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

std::shared_ptr<SymmetricSegment> Engine::allocate(std::size_t bytes) {
  struct Offer {
    std::uint64_t bytes = 0;
    std::int32_t pid = 0;
    std::int32_t fd = -1;
    char error[240] = {};
  };
  const auto ranks = static_cast<std::size_t>(world_size_);
  const auto gather = [&](const Offer& offer) {
    std::vector<Offer> offers(ranks);
    Request request{.kind = CollectiveKind::kAllGather, .input = &offer, .numel = sizeof(Offer)};
    for (Offer& theirs : offers) request.outputs.push_back(&theirs);
    wait(post(std::move(request)));
    return offers;
  };
  const auto throw_first_error = [](const std::vector<Offer>& offers) {
    for (std::size_t r = 0; r < offers.size(); ++r) {
      if (offers[r].error[0])
        throw Error(fmt::format("rank {}: {}", r, offers[r].error),
                    {.rank = static_cast<int>(r), .call = "allocate"});
    }
  };

  Offer own{.bytes = bytes, .pid = ::getpid()};
  const auto note_error = [&own](const std::exception& error) {
    fmt::format_to_n(own.error, sizeof own.error - 1, "{}", error.what());
  };
  auto segment = std::make_shared<SymmetricSegment>();
  segment->bytes = bytes;
  segment->mappings.resize(ranks);
  Mapping& mapping = segment->mappings[static_cast<std::size_t>(rank_)];
  try {
    mapping = Mapping::create(fmt::format("segment-{}", rank_), bytes);
    own.fd = mapping.descriptor();
  } catch (const Error& error) {
    note_error(error);
  }
  const auto offers = gather(own);
  for (int r = 0; r < world_size_; ++r) {
    if (offers[static_cast<std::size_t>(r)].bytes != bytes) {
      const std::unique_lock lock(mutex_);
      fail(FailureKind::kMismatch,
           fmt::format("allocate: rank {} asked for {} bytes of symmetric memory, rank {} for {}", 0, offers[0].bytes,
                       r == 0 ? rank_ : r, r == 0 ? bytes : offers[static_cast<std::size_t>(r)].bytes),
           r);
    }
  }
  throw_first_error(offers);
  try {
    for (int r = 0; r < world_size_; ++r) {
      const auto index = static_cast<std::size_t>(r);
      if (r != rank_) segment->mappings[index] = Mapping::open(offers[index].pid, offers[index].fd, bytes);
      segment->base.push_back(segment->mappings[index].data());
    }
  } catch (const Error& error) {
    note_error(error);
  }
  throw_first_error(gather(own));  // Also keeps the descriptor open until everybody has mapped it.
  mapping.close_descriptor();
  const std::unique_lock lock(mutex_);
  segment->id = next_segment_++;
  std::erase_if(segments_, [](const auto& old) { return old.expired(); });
  segments_.push_back(segment);
  return segment;
}

}  // namespace ddpkit::shm
