#include "comm/trace/event_ring.h"

#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <iterator>

#include <fmt/format.h>

#include <ddpkit/parse_number.h>

namespace ddpkit {
namespace {

/// The signal is SIGRTMIN plus this number. Programs may use SIGUSR1 and SIGUSR2.
constexpr int kSignalsAfterFirst = 7;
constexpr int kMostFrames = 64;

int page_descriptor() noexcept {
  const char* text = std::getenv(kEventPageVariable);
  int fd = -1;
  return text && parse_number(text, fd) ? fd : -1;
}

}  // namespace

const char* name_of(EventKind kind) {
  constexpr const char* kNames[] = {"barrier",
                                    "all_reduce",
                                    "reduce",
                                    "broadcast",
                                    "all_gather",
                                    "gather",
                                    "scatter",
                                    "reduce_scatter",
                                    "all_to_all",
                                    "all_reduce_coalesced",
                                    "reduce_scatter_coalesced",
                                    "send",
                                    "recv",
                                    "graph_replay",
                                    "forward",
                                    "backward",
                                    "bucket",
                                    "reduction",
                                    "wait for bucket",
                                    "broadcast buffers",
                                    "span"};
  const auto index = static_cast<std::size_t>(kind);
  return index < std::size(kNames) ? kNames[index] : "?";
}

std::string describe(const Event& event) {
  if (is_activity(event.kind))
    return event.bucket < 0 ? name_of(event.kind) : fmt::format("{} {}", name_of(event.kind), event.bucket);
  return fmt::format("{} number {} ({} bytes, group {}{})", name_of(event.kind), event.sequence, event.bytes,
                     event.group, event.bucket < 0 ? "" : fmt::format(", bucket {}", event.bucket));
}

std::optional<Event> EventPage::read(std::uint64_t index) const noexcept {
  const Slot& slot = slots[index % kEvents];
  const std::uint64_t what = slot.what.load();
  const Event event{.index = index,
                    .kind = static_cast<EventKind>(what & 0xff),
                    .group = static_cast<std::uint32_t>(what >> 8) & 0xffffff,
                    .bucket = static_cast<std::int32_t>(what >> 32) - 1,
                    .sequence = slot.sequence.load(),
                    .bytes = slot.bytes.load(),
                    .step = slot.step.load(),
                    .begin_ns = slot.begin_ns.load(),
                    .end_ns = slot.end_ns.load(),
                    .finished = slot.state.load() == 2 * index + 1};
  const std::uint64_t check =
      hash_of(index, what, event.sequence, event.bytes, event.step, event.begin_ns, event.end_ns);
  return slot.check.load() == check ? std::optional(event) : std::nullopt;
}

EventRing& EventRing::of_process() noexcept {
  static EventRing* ring = new EventRing;
  return *ring;
}

EventRing::EventRing() noexcept {
  attach();
  if (!page_) page_ = new EventPage;
  install_handler();
}

void EventRing::attach() noexcept {
  const int fd = page_descriptor();
  struct stat file {};
  // The descriptor may belong to another file.
  if (fd < 0 || ::fstat(fd, &file) != 0 || file.st_size != static_cast<off_t>(sizeof(EventPage))) return;
  void* memory = ::mmap(nullptr, sizeof(EventPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return;
  auto* page = static_cast<EventPage*>(memory);
  std::int32_t nobody = 0;
  if (page->layout.load() != EventPage::kLayout || !page->pid.compare_exchange_strong(nobody, ::getpid())) {
    ::munmap(memory, sizeof(EventPage));
    return;
  }
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  page_ = page;
  fd_ = fd;
}

void EventRing::install_handler() noexcept {
  const int signal = SIGRTMIN + kSignalsAfterFirst;
  struct sigaction current {};
  if (signal > SIGRTMAX || ::sigaction(signal, nullptr, &current) != 0 || current.sa_handler != SIG_DFL) return;
  void* frame = nullptr;
  ::backtrace(&frame, 1);  // Loads libgcc now, because the handler must not.
  struct sigaction action {};
  action.sa_handler = &EventRing::write_stack;
  action.sa_flags = SA_RESTART;
  if (::sigaction(signal, &action, nullptr) == 0) page_->stack_signal.store(signal);
}

void EventRing::write_stack(int) {
  const int error_before = errno;
  EventRing& self = of_process();
  void* frames[kMostFrames];
  const int count = ::backtrace(frames, kMostFrames);
  if (self.fd_ < 0) {
    ::backtrace_symbols_fd(frames + 2, std::max(0, count - 2), STDERR_FILENO);
  } else {
    constexpr auto kBegin = static_cast<off_t>(offsetof(EventPage, stack));
    // Stops before the end of the page: more lines would make the file longer than the page.
    ::lseek(self.fd_, kBegin, SEEK_SET);
    // Skips this handler and the kernel's call of it.
    for (int i = 2; i < count && ::lseek(self.fd_, 0, SEEK_CUR) < kBegin + static_cast<off_t>(kStackBytes) - 1024; ++i)
      ::backtrace_symbols_fd(frames + i, 1, self.fd_);
    const off_t end = std::min(::lseek(self.fd_, 0, SEEK_CUR), kBegin + static_cast<off_t>(kStackBytes));
    self.page_->stack_bytes.store(static_cast<std::uint32_t>(end - kBegin));
    self.page_->stacks.fetch_add(1);
  }
  errno = error_before;
}

void EventRing::waits(std::uint64_t index) noexcept {
  if (index == kNoEvent) return;
  auto event = page_->read(index);
  if (!event || event->begin_ns != 0) return;
  event->begin_ns = coarse_now_ns();
  write(index, *event);
}

void EventRing::fail(FailureKind failure, std::optional<int> failed_rank) noexcept {
  Outcome none;
  page_->outcome.compare_exchange_strong(none, {.failure = failure, .failed_rank = failed_rank.value_or(-1)});
}

std::int64_t EventRing::coarse_now_ns() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace ddpkit
