#include "comm/trace/recorder.h"

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

#include <ddpkit/comm/flight_recorder.h>
#include <ddpkit/parse_number.h>

namespace ddpkit::flight {
namespace {

/// The signal is SIGRTMIN plus this number. Programs may use SIGUSR1 and SIGUSR2.
constexpr int kSignalsAfterFirst = 7;
constexpr int kMostFrames = 64;

int page_descriptor() noexcept {
  const char* text = std::getenv(kPageVariable);
  if (!text) return -1;
  int fd = -1;
  return parse_number(text, fd) ? fd : -1;
}

}  // namespace

const char* name_of(Call call) {
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
                                    "graph_replay"};
  const auto index = static_cast<std::size_t>(call);
  return index < std::size(kNames) ? kNames[index] : "?";
}

Recorder& Recorder::of_process() noexcept {
  static Recorder* recorder = new Recorder;
  return *recorder;
}

Recorder::Recorder() noexcept {
  attach();
  if (!page_) page_ = new Page;
  install_handler();
}

void Recorder::attach() noexcept {
  page_ = nullptr;
  const int fd = page_descriptor();
  struct stat file {};
  // The descriptor may belong to another file.
  if (fd < 0 || ::fstat(fd, &file) != 0 || file.st_size != static_cast<off_t>(sizeof(Page))) return;
  void* memory = ::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return;
  auto* page = static_cast<Page*>(memory);
  std::int32_t nobody = 0;
  if (page->layout.load() != kLayout || !page->pid.compare_exchange_strong(nobody, ::getpid())) {
    ::munmap(memory, sizeof(Page));
    return;
  }
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  page_ = page;
  fd_ = fd;
}

void Recorder::install_handler() noexcept {
  const int signal = SIGRTMIN + kSignalsAfterFirst;
  struct sigaction current {};
  if (signal > SIGRTMAX || ::sigaction(signal, nullptr, &current) != 0 || current.sa_handler != SIG_DFL) return;
  void* frame = nullptr;
  ::backtrace(&frame, 1);  // Loads libgcc now, because the handler must not.
  struct sigaction action {};
  action.sa_handler = &Recorder::write_stack;
  action.sa_flags = SA_RESTART;
  if (::sigaction(signal, &action, nullptr) == 0) page_->stack_signal.store(signal);
}

void Recorder::write_stack(int) {
  const int error_before = errno;
  Recorder& self = of_process();
  void* frames[kMostFrames];
  const int count = ::backtrace(frames, kMostFrames);
  if (self.fd_ < 0) {
    ::backtrace_symbols_fd(frames + 2, std::max(0, count - 2), STDERR_FILENO);
  } else {
    constexpr auto kBegin = static_cast<off_t>(offsetof(Page, stack));
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

void Recorder::waits(std::uint64_t index) noexcept {
  Record& record = page_->records[index % kRecords];
  if (record.index.load(std::memory_order_relaxed) == index && record.started_ms.load(std::memory_order_relaxed) == 0)
    record.started_ms.store(now_ms(), std::memory_order_relaxed);
}

void Recorder::fail(Failure failure, std::optional<int> culprit) noexcept {
  Outcome none;
  page_->outcome.compare_exchange_strong(none, {.failure = failure, .culprit = culprit.value_or(-1)});
}

std::uint64_t Recorder::now_ms() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1000 + static_cast<std::uint64_t>(now.tv_nsec) / 1000000;
}

}  // namespace ddpkit::flight

namespace ddpkit {

void note_step(std::int64_t step) noexcept { flight::Recorder::of_process().set_step(step); }

}  // namespace ddpkit
