#include "simulation.h"

#include <cxxabi.h>
#include <linux/membarrier.h>
#include <sys/mman.h>

#include <cstring>
#include <new>

#include <fmt/format.h>

namespace ddpkit::schedules {
namespace {

constexpr std::size_t kStackBytes = std::size_t{256} << 10;
constexpr std::size_t kPage = 4096;
/// More steps than any schedule that ends: only a livelock reaches it.
constexpr std::uint64_t kMostSteps = 1'000'000;

Simulation* running = nullptr;

/// Unused stacks.
std::vector<std::unique_ptr<char[]>>& spare_stacks() {
  static std::vector<std::unique_ptr<char[]>> stacks;
  return stacks;
}

}  // namespace

Arena& Arena::instance() {
  static Arena arena;
  return arena;
}

Arena::Arena() {
  void* pages = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  begin_ = static_cast<std::byte*>(pages);
}

std::byte* Arena::take(std::size_t bytes) {
  std::byte* const taken = begin_ + used_;
  used_ += (bytes + kPage - 1) / kPage * kPage;
  if (used_ > kBytes) throw std::bad_alloc();
  return taken;
}

Simulation::Simulation(const Options& options, std::function<void(int)> body)
    : options_(options),
      body_(std::move(body)),
      memory_([this](std::size_t allowed) { return started_ ? options_.strategy->pick_store(allowed) : 0; },
              [this](const std::string& text) { fail(text); }),
      ranks_(static_cast<std::size_t>(options.ranks)) {
  memory_.synchronize();
  for (Rank& rank : ranks_) {
    if (spare_stacks().empty()) {
      rank.stack = std::make_unique<char[]>(kStackBytes);
    } else {
      rank.stack = std::move(spare_stacks().back());
      spare_stacks().pop_back();
    }
    ::getcontext(&rank.context);
    rank.context.uc_stack.ss_sp = rank.stack.get();
    rank.context.uc_stack.ss_size = kStackBytes;
    rank.context.uc_link = nullptr;
    ::makecontext(&rank.context, &Simulation::enter, 0);
  }
}

Simulation::~Simulation() {
  for (Rank& rank : ranks_) spare_stacks().push_back(std::move(rank.stack));
}

Simulation* Simulation::current() { return running; }

void Simulation::enter() {
  Simulation& simulation = *running;
  simulation.body_(simulation.running_);
  simulation.leave(State::kFinished);
}

unsigned Simulation::ready() const {
  unsigned bits = 0;
  for (std::size_t r = 0; r < ranks_.size(); ++r) bits |= ranks_[r].state == State::kReady ? 1U << r : 0U;
  return bits;
}

int Simulation::decide() {
  Strategy& strategy = started_ ? *options_.strategy : in_turn_;
  return strategy.pick(ready(), last_);
}

std::string Simulation::run() {
  while (fault_.empty()) {
    int next = next_;
    next_ = -1;
    if (next < 0) {
      if (ready() == 0 && !pass_time()) break;
      next = decide();
    }
    resume(next);
  }
  return fault_;
}

void Simulation::resume(int rank) {
  if (last_ != rank) ++switches_;
  running_ = last_ = rank;
  running = this;
  auto* exceptions = abi::__cxa_get_globals();
  std::array<void*, 2> outside;
  std::memcpy(outside.data(), exceptions, sizeof outside);
  std::memcpy(static_cast<void*>(exceptions), self().exceptions.data(), sizeof outside);
  ::swapcontext(&main_, &self().context);
  std::memcpy(self().exceptions.data(), exceptions, sizeof outside);
  std::memcpy(static_cast<void*>(exceptions), outside.data(), sizeof outside);
  running = nullptr;
  running_ = -1;
}

void Simulation::leave(State state) {
  self().state = state;
  ::swapcontext(&self().context, &main_);
}

void Simulation::point() {
  if (!started_) return;
  Rank& rank = self();
  if (options_.death && options_.death->rank == running_ && rank.points == options_.death->point) leave(State::kDead);
  ++rank.points;
  if (++steps_ > kMostSteps) fail("the ranks do not come to an end: a livelock");
  next_ = decide();
  if (next_ != running_) leave(State::kReady);
  next_ = -1;
}

void Simulation::sleep(std::int64_t nanoseconds) {
  point();
  self().deadline = time_ + nanoseconds;
  leave(State::kSleeping);
}

long Simulation::barrier_on_all(long command) {
  point();
  if (!options_.membarrier) return -1;
  if (command != MEMBARRIER_CMD_GLOBAL_EXPEDITED) return 0;
  // The kernel also executes a barrier on the caller, before and after those of the others.
  memory_.fence(running_, std::memory_order_seq_cst);
  for (int r = 0; r < options_.ranks; ++r) memory_.fence(r, std::memory_order_seq_cst);
  memory_.fence(running_, std::memory_order_seq_cst);
  return 0;
}

std::int64_t Simulation::now() {
  point();
  return time_;
}

bool Simulation::wait(const std::uint32_t* word, std::uint32_t seen, std::int64_t nanoseconds) {
  point();
  if (*word != seen) return true;  // The kernel compares and queues in one step; it reads the newest value.
  Rank& rank = self();
  rank.word = word;
  rank.deadline = time_ + nanoseconds;
  rank.timed_out = false;
  leave(State::kWaiting);
  return !rank.timed_out;
}

void Simulation::wake(const std::uint32_t* word) {
  point();
  for (Rank& rank : ranks_) {
    if (rank.state == State::kWaiting && rank.word == word) rank.state = State::kReady;
  }
}

void Simulation::start() { leave(State::kAtStart); }

void Simulation::fail(const std::string& text) {
  fault_ = fmt::format("{}{}", running_ >= 0 ? fmt::format("in rank {}: ", running_) : "", text);
  leave(State::kDead);
  __builtin_unreachable();
}

/// Called when no rank can run: the ranks have finished, wait in start(), or wait for time to pass. Returns false if
/// all have finished.
bool Simulation::pass_time() {
  Rank* first = nullptr;
  bool at_start = false, has_dead = false;
  std::string waiting;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    at_start |= rank.state == State::kAtStart;
    has_dead |= rank.state == State::kDead;
    if (rank.state != State::kSleeping && rank.state != State::kWaiting) continue;
    waiting += fmt::format("{}{}", waiting.empty() ? "" : ", ", r);
    if (!first || rank.deadline < first->deadline) first = &rank;
  }
  if (first) {
    if (first->state == State::kWaiting && !options_.naps_expire && !has_dead) {
      fault_ = fmt::format("lost wake-up: nobody runs, and only the end of a nap wakes rank {}", waiting);
      return false;
    }
    time_ = std::max(time_, first->deadline);
    first->timed_out = true;
    first->state = State::kReady;
    return true;
  }
  if (!at_start) return false;
  started_ = true;
  last_ = -1;
  memory_.synchronize();
  for (Rank& rank : ranks_) {
    if (rank.state == State::kAtStart) rank.state = State::kReady;
  }
  return true;
}

}  // namespace ddpkit::schedules
