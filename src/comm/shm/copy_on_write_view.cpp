#include "comm/shm/copy_on_write_view.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>

#include <fmt/format.h>

#include <ddpkit/error.h>

namespace ddpkit::shm {
namespace {

constexpr std::size_t kSmallestGranule = std::size_t{64} << 10;
/// Each granule may become a separate mapping, and the kernel allows 65,530 mappings per process.
constexpr std::size_t kMostGranules = 4096;

std::size_t granule_of(std::size_t bytes) {
  std::size_t granule = kSmallestGranule;
  while (granule * kMostGranules < bytes) granule *= 2;
  return granule;
}

/// The last fault of a thread that was passed to the previous handler. The address of the siginfo is only compared.
struct PassedOn {
  const siginfo_t* info = nullptr;
  const std::byte* frame = nullptr;
};

}  // namespace

/// All views of the process, for the signal handler.
class CopyOnWriteViews {
 public:
  static void add(CopyOnWriteView* view) {
    const std::lock_guard lock(mutex());
    install();
    for (auto& place : views_) {
      CopyOnWriteView* empty = nullptr;
      if (place.compare_exchange_strong(empty, view)) return;
    }
    throw Error(fmt::format("a process can hold {} models with shared weights at most", CopyOnWriteView::kMostViews));
  }

  static void remove(CopyOnWriteView* view) noexcept {
    for (auto& place : views_) {
      CopyOnWriteView* expected = view;
      if (place.compare_exchange_strong(expected, nullptr)) return;
    }
  }

 private:
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }

  /// Called for each view, because other code may have replaced the handler.
  static void install() {
    struct sigaction current {};
    if (::sigaction(SIGSEGV, nullptr, &current) == 0 && current.sa_sigaction == &CopyOnWriteViews::handle) return;
    before_ = current;
    struct sigaction action {};
    action.sa_sigaction = &CopyOnWriteViews::handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    ::sigemptyset(&action.sa_mask);
    if (::sigaction(SIGSEGV, &action, nullptr) != 0)
      throw Error(fmt::format("cannot install a handler for SIGSEGV: {}", std::strerror(errno)));
  }

  static void handle(int signal, siginfo_t* info, void* context) {
    const int error = errno;
    const auto* address = static_cast<const std::byte*>(info->si_addr);
    if (info->si_code == SEGV_ACCERR) {
      for (auto& place : views_) {
        CopyOnWriteView* view = place.load(std::memory_order_acquire);
        if (view && view->let_write(address)) {
          errno = error;
          return;
        }
      }
    }
    // Two handlers that each call the other as the previous one would not terminate. Then the same signal arrives again
    // from further up this thread's stack. This check works also if a handler jumps out and never returns.
    const auto* frame = static_cast<const std::byte*>(__builtin_frame_address(0));
    const bool came_back = passed_on_.info == info && frame < passed_on_.frame;
    passed_on_ = {info, frame};
    if (!came_back && before_.sa_flags & SA_SIGINFO) return before_.sa_sigaction(signal, info, context);
    if (!came_back && before_.sa_handler != SIG_DFL && before_.sa_handler != SIG_IGN) return before_.sa_handler(signal);
    ::signal(SIGSEGV, SIG_DFL);
    if (info->si_code <= 0) ::raise(SIGSEGV);  // Sent by kill(), so returning does not raise it again.
    errno = error;
  }

  static inline std::array<std::atomic<CopyOnWriteView*>, CopyOnWriteView::kMostViews> views_{};
  static inline struct sigaction before_ {};
  static inline thread_local PassedOn passed_on_;
};

CopyOnWriteView::CopyOnWriteView(const RankProcessId& owner, int fd, std::size_t bytes)
    : bytes_(bytes), granule_(granule_of(bytes)) {
  const int opened = open_descriptor(owner, fd, O_RDONLY);
  void* data = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, opened, 0);
  const int error = errno;
  ::close(opened);
  if (data == MAP_FAILED)
    throw Error(fmt::format("cannot map {} bytes of shared weights: {}", bytes, std::strerror(error)));
  data_ = static_cast<std::byte*>(data);
  written_ = std::make_unique<std::atomic<bool>[]>(granules());
  try {
    CopyOnWriteViews::add(this);
  } catch (...) {
    ::munmap(data_, bytes_);
    throw;
  }
}

CopyOnWriteView::~CopyOnWriteView() {
  CopyOnWriteViews::remove(this);
  ::munmap(data_, bytes_);
}

bool CopyOnWriteView::let_write(const std::byte* address) noexcept {
  if (address < data_ || address >= data_ + bytes_) return false;
  const std::size_t granule = static_cast<std::size_t>(address - data_) / granule_;
  const std::size_t begin = granule * granule_;
  if (::mprotect(data_ + begin, std::min(granule_, bytes_ - begin), PROT_READ | PROT_WRITE) != 0) return false;
  written_[granule].store(true, std::memory_order_release);
  written_any_.store(true, std::memory_order_release);
  return true;
}

void CopyOnWriteView::reset() noexcept {
  if (!is_written()) return;
  for (std::size_t g = 0; g < granules(); ++g) {
    if (!is_written(g)) continue;
    const std::size_t begin = g * granule_;
    const std::size_t length = std::min(granule_, bytes_ - begin);
    ::mprotect(data_ + begin, length, PROT_READ);
    ::madvise(data_ + begin, length, MADV_DONTNEED);
    written_[g].store(false, std::memory_order_release);
  }
  written_any_.store(false, std::memory_order_release);
}

}  // namespace ddpkit::shm
