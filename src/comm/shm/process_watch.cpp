#include "comm/shm/process_watch.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include <fmt/format.h>

namespace ddpkit::shm {
namespace {

/// A robust futex (set_robust_list(2)). When the thread whose ID is in `word` ends, the kernel sets FUTEX_OWNER_DIED.
/// It does this before it frees the memory of the process; pidfds and sockets report the end after that.
struct Page {
  robust_list node = {};
  std::atomic<std::uint32_t> word{0};
  std::uint64_t key = 0;
};

/// The page of this process, and the thread whose end is the end of the process.
class Life {
 public:
  Life() : fd_(::memfd_create("ddpkit:life", MFD_CLOEXEC)) {
    if (fd_ < 0 || ::ftruncate(fd_, sizeof(Page)) != 0) return;
    void* const mapped = ::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    std::uint64_t key = 0;
    if (mapped == MAP_FAILED || ::getrandom(&key, sizeof key, 0) != sizeof key) return;
    page_ = new (mapped) Page{.key = key};
    std::thread([this] { own_word(); }).detach();
    state_.wait(kStarting);
  }
  LifePage page() const noexcept { return state_ == kOwned ? LifePage{fd_, page_->key} : LifePage{}; }

 private:
  enum State { kStarting, kOwned, kUnsupported };

  void own_word() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, nullptr);  // The program's handlers run on its own threads.
    // Replaces glibc's list of this thread, which uses no robust mutex.
    list_.list.next = &page_->node;
    list_.futex_offset = offsetof(Page, word) - offsetof(Page, node);
    page_->node.next = &list_.list;
    page_->word = static_cast<std::uint32_t>(::gettid());
    const bool owned = ::syscall(SYS_set_robust_list, &list_, sizeof list_) == 0;
    state_ = owned ? kOwned : kUnsupported;
    state_.notify_all();
    while (owned) ::pause();
  }

  const int fd_;
  Page* page_ = nullptr;
  robust_list_head list_ = {};
  std::atomic<State> state_ = kStarting;
};

}  // namespace

LifePage life_page() {
  static std::mutex mutex;
  static Life* life = nullptr;  // Never destroyed: its thread runs until the process ends.
  static pid_t owner = 0;       // A child made by fork() does not have the thread.
  const std::lock_guard lock(mutex);
  if (std::exchange(owner, ::getpid()) != ::getpid()) life = new Life;
  return life->page();
}

ProcessWatch::ProcessWatch(int pid, LifePage page)
    : pid_(pid), fd_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {
  if (page.fd < 0) return;
  // Fails if the process has ended, or if the kernel protects it from this one. Then the pidfd suffices.
  const int opened = ::open(fmt::format("/proc/{}/fd/{}", pid, page.fd).c_str(), O_RDONLY | O_CLOEXEC);
  if (opened < 0) return;
  struct stat status = {};
  void* mapped = MAP_FAILED;
  if (::fstat(opened, &status) == 0 && status.st_size == sizeof(Page))
    mapped = ::mmap(nullptr, sizeof(Page), PROT_READ, MAP_SHARED, opened, 0);
  ::close(opened);
  if (mapped == MAP_FAILED) return;
  page_ = mapped;
  if (static_cast<const Page*>(page_)->key != page.key) unmap();
}

void ProcessWatch::unmap() noexcept {
  if (page_ != nullptr) ::munmap(const_cast<void*>(std::exchange(page_, nullptr)), sizeof(Page));
}

ProcessWatch::~ProcessWatch() {
  if (fd_ >= 0) ::close(fd_);
  unmap();
}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      fd_(std::exchange(other.fd_, -1)),
      page_(std::exchange(other.page_, nullptr)) {}

ProcessWatch& ProcessWatch::operator=(ProcessWatch&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(fd_, other.fd_);
  std::swap(page_, other.page_);
  return *this;
}

bool ProcessWatch::alive() const noexcept {
  if (page_ != nullptr) {
    if ((static_cast<const Page*>(page_)->word.load() & FUTEX_OWNER_DIED) == 0) return true;
    // The kernel ends the threads one after another. Until it interrupts the others, they may still write.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return false;
  }
  if (fd_ >= 0) {
    pollfd descriptor{fd_, POLLIN, 0};
    return ::poll(&descriptor, 1, 0) <= 0;  // An error of poll() does not mean that the process has ended.
  }
  // A kernel or a sandbox without pidfd.
  return pid_ > 0 && (::kill(pid_, 0) == 0 || errno == EPERM);
}

}  // namespace ddpkit::shm
