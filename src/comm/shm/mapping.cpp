#include "comm/shm/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/host.h"
#include "comm/shm/process_watch.h"
#include "comm/timeout.h"

namespace ddpkit::shm {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

double mebibytes(std::size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

std::string descriptor_path(const RankProcessId& owner, int fd) { return fmt::format("/proc/{}/fd/{}", owner.pid, fd); }

[[noreturn]] void throw_out_of_memory(const std::string& name, std::size_t bytes, int error) {
  std::string limit;
  if (const auto addresses = available_addresses(); addresses && *addresses < bytes)
    limit = fmt::format(
        "; RLIMIT_AS (ulimit -v) leaves this process {:.1f} MiB: raise it, or choose a smaller arena "
        "(arena_mb)",
        mebibytes(*addresses));
  throw Error(fmt::format("no shared memory for {}: {:.1f} MiB asked for, {:.1f} MiB available ({}){}", name,
                          mebibytes(bytes), mebibytes(available_memory()), std::strerror(error), limit));
}

/// Repeats a system call that a signal has interrupted.
template <class Call>
int retried(const Call& call) {
  int result;
  do result = call();
  while (result < 0 && errno == EINTR);
  return result;
}

/// Seals the file: peers may write to the pages, but neither execute them nor truncate the file, which would cause
/// SIGBUS in this process.
int create_sealed(const std::string& name, std::size_t bytes) {
  constexpr unsigned kNoExecSeal = 8;  // MFD_NOEXEC_SEAL, which older headers do not define.
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  int fd = ::memfd_create(("ddpkit:" + name).c_str(), flags | kNoExecSeal);
  if (fd < 0 && errno == EINVAL) fd = ::memfd_create(("ddpkit:" + name).c_str(), flags);  // Kernels before 6.3.
  if (fd < 0) throw Error(fmt::format("memfd_create for {} failed: {}", name, std::strerror(errno)));
  if (retried([&] { return ::ftruncate(fd, static_cast<off_t>(bytes)); }) != 0) {
    const int error = errno;
    ::close(fd);
    throw_out_of_memory(name, bytes, error);
  }
  ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return fd;
}

/// The mappings of this process.
class MappedPages {
 public:
  static MappedPages& all() {
    static auto* mapped = new MappedPages;  // Never destroyed: mappings may be destroyed until the program ends.
    return *mapped;
  }

  /// Returns the pages of a descriptor. Maps them if they are not mapped. Returns null and sets errno on failure.
  std::shared_ptr<std::byte> get(int fd, std::size_t bytes, Mapping::Populate populate) {
    struct stat file {};
    if (::fstat(fd, &file) != 0) return nullptr;
    if (static_cast<std::size_t>(file.st_size) < bytes) {  // The number belongs to another file now.
      errno = EBADF;
      return nullptr;
    }
    const Key key{file.st_dev, file.st_ino, bytes};
    const std::lock_guard lock(mutex_);
    // A mapped file continues to exist, so no other file can have its inode number.
    if (const auto found = pages_.find(key); found != pages_.end()) {
      if (auto pages = found->second.lock()) return pages;
    }
    const int flag = populate == Mapping::Populate::kEager ? MAP_POPULATE : 0;
    void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flag, fd, 0);
    if (data == MAP_FAILED) return nullptr;
    if (bytes >= kHugePage) ::madvise(data, bytes, MADV_HUGEPAGE);
    std::shared_ptr<std::byte> pages(static_cast<std::byte*>(data),
                                     [bytes](std::byte* mapped) { ::munmap(mapped, bytes); });
    std::erase_if(pages_, [](const auto& entry) { return entry.second.expired(); });
    pages_[key] = pages;
    return pages;
  }

 private:
  using Key = std::tuple<dev_t, ino_t, std::size_t>;
  std::mutex mutex_;
  std::map<Key, std::weak_ptr<std::byte>> pages_;
};

}  // namespace

Mapping::~Mapping() { close_descriptor(); }

Mapping Mapping::create(const std::string& name, std::size_t bytes, Populate populate) {
  // A request for more than the available memory would not fail but cause the kernel's out-of-memory killer to run.
  const std::size_t available = available_memory();
  if (populate == Populate::kEager && available != 0 && bytes > available) throw_out_of_memory(name, bytes, ENOMEM);
  Mapping mapping;
  mapping.fd_ = create_sealed(name, bytes);
  // Advice for huge pages affects only pages that do not exist yet, so it must precede the allocation.
  mapping.pages_ = MappedPages::all().get(mapping.fd_, bytes, Populate::kLazy);
  if (!mapping.pages_) throw_out_of_memory(name, bytes, errno);
  mapping.size_ = bytes;
  if (populate == Populate::kLazy) return mapping;
  // If there is no memory, this fails with an error, while a first touch would raise SIGBUS.
  if (retried([&] { return ::fallocate(mapping.fd_, 0, 0, static_cast<off_t>(bytes)); }) != 0)
    throw_out_of_memory(name, bytes, errno);
  return mapping;
}

int open_descriptor(const RankProcessId& owner, int fd, int flags, const std::function<bool()>& has_closed) {
  const std::string path = descriptor_path(owner, fd);
  const int opened = ::open(path.c_str(), flags | O_CLOEXEC);
  if (opened >= 0) return opened;
  const int error = errno;
  // An ending process closes its descriptors shortly before it counts as ended.
  const ProcessWatch watch(owner.pid);
  const auto ends_or_has_closed = [&] { return (has_closed && has_closed()) || !watch.alive(); };
  if (poll_until(std::chrono::steady_clock::now() + std::chrono::seconds(2), ends_or_has_closed) && !watch.alive())
    throw PeerLost(fmt::format("rank {} (pid {}) ended before its shared memory was opened", owner.rank, owner.pid),
                   {.rank = owner.rank, .call = "rendezvous"});
  const char* advice = "the ranks must run on one host and in one container; use the gloo backend otherwise";
  if (error == EMFILE)
    advice = "this rank has too many files open; raise its limit (ulimit -n)";
  else if (error == ENFILE)
    advice = "this host has too many files open; raise fs.file-max";
  else if (error == EACCES && ::prctl(PR_GET_DUMPABLE) != 1)
    advice =
        "this program is not dumpable, so Linux hides its memory from the other ranks; make its file readable "
        "(chmod +r) and remove setuid bits and file capabilities, or use the gloo backend";
  else if (error == EACCES || error == EPERM)
    advice =
        "the ranks must run as one user, and may not be protected from each other (a hardened kernel); use the gloo "
        "backend otherwise";
  throw RendezvousError(fmt::format("cannot open the shared memory of rank {} (pid {}, {}: {}): {}", owner.rank,
                                    owner.pid, path, std::strerror(error), advice),
                        {.rank = error == EMFILE || error == ENFILE ? std::nullopt : std::optional<int>(owner.rank),
                         .call = "rendezvous"});
}

Mapping Mapping::open(const RankProcessId& owner, int fd, std::size_t bytes, Populate populate,
                      const std::function<bool()>& has_closed) {
  const int opened = open_descriptor(owner, fd, O_RDWR, has_closed);
  Mapping mapping;
  mapping.pages_ = MappedPages::all().get(opened, bytes, populate);
  const int error = errno;
  ::close(opened);
  if (!mapping.pages_) throw_out_of_memory(descriptor_path(owner, fd), bytes, error);
  mapping.size_ = bytes;
  return mapping;
}

Mapping Mapping::copy() const {
  Mapping mapping;
  mapping.pages_ = pages_;
  mapping.size_ = size_;
  if (fd_ >= 0) mapping.fd_ = ::fcntl(fd_, F_DUPFD_CLOEXEC, 0);
  return mapping;
}

void Mapping::close_descriptor() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

}  // namespace ddpkit::shm
