// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

namespace ddpkit::shm {

/// A rank and its process, which may be this one.
struct Owner {
  int rank = -1;
  int pid = 0;
};

/// The owner's descriptor `fd`, opened here with the `flags` of open(2). Throws PeerLost when its process has ended, as
/// it may between offering a descriptor and this; RendezvousError with the cause when it cannot be opened (another
/// host, container or user, too many open files).
int open_descriptor(const Owner& owner, int fd, int flags);

/// Pages shared between processes, from an unnamed memory file (memfd): nothing appears in any file system, and the
/// kernel takes the pages back when the last process that maps them has ended, however it ended.
///
/// A process maps each page once: mappings of the same pages share one address (ranks that are threads of one process).
/// Creating, opening and destroying are thread-safe.
class Mapping {
 public:
  Mapping() = default;
  ~Mapping();
  Mapping(Mapping&& other) noexcept
      : pages_(std::move(other.pages_)), size_(std::exchange(other.size_, 0)), fd_(std::exchange(other.fd_, -1)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(pages_, other.pages_);
    std::swap(size_, other.size_);
    std::swap(fd_, other.fd_);
    return *this;
  }

  enum class Fill { kNow, kOnTouch };

  /// New pages, all zero. kNow: really there (the calling thread's NUMA policy places them); kOnTouch: each takes
  /// memory only once it is used. `name` shows in /proc/PID/maps. Throws Error that says how much was asked for and how
  /// much there is.
  static Mapping create(const std::string& name, std::size_t bytes, Fill fill = Fill::kNow);

  /// The pages behind the owner's descriptor. Throws as open_descriptor() does.
  static Mapping open(const Owner& owner, int fd, std::size_t bytes, Fill fill = Fill::kNow);

  std::byte* data() const noexcept { return pages_.get(); }
  std::size_t size() const noexcept { return size_; }
  /// The descriptor others may open; -1 after close_descriptor() and for opened mappings.
  int descriptor() const noexcept { return fd_; }
  /// Once every peer has opened it, the mapping no longer needs its descriptor.
  void close_descriptor() noexcept;

 private:
  std::shared_ptr<std::byte> pages_;  ///< Unmapped with their last mapping in this process.
  std::size_t size_ = 0;
  int fd_ = -1;
};

}  // namespace ddpkit::shm
