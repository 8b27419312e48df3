// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace ddpkit::shm {

/// A rank and its process, which may be this one.
struct RankProcessId {
  int rank = -1;
  int pid = 0;
};

/// Opens the owner's descriptor `fd` in this process, with the `flags` of open(2). Throws PeerLost if the owner's
/// process has ended. Throws RendezvousError with the cause if it cannot be opened (another host, container or user,
/// too many open files). `has_closed`: whether the owner may have closed the descriptor because of a failure.
int open_descriptor(const RankProcessId& owner, int fd, int flags, const std::function<bool()>& has_closed = {});

/// Pages shared between processes, from an anonymous memory file (memfd). They are not visible in a file system. The
/// kernel frees them when the last process that maps them has ended, for any reason.
///
/// A process maps each page once: mappings of the same pages share one address (for ranks that are threads of one
/// process). Creating, opening and destroying are thread-safe.
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

  enum class Populate { kEager, kLazy };

  /// Creates zeroed pages. kEager: allocates all pages (placed by the calling thread's NUMA policy). kLazy: allocates
  /// each page on first use. `name` is shown in /proc/PID/maps. Throws Error, which gives the requested and the
  /// available size.
  static Mapping create(const std::string& name, std::size_t bytes, Populate populate = Populate::kEager);

  /// Maps the pages of the owner's descriptor. Throws like open_descriptor().
  static Mapping open(const RankProcessId& owner, int fd, std::size_t bytes, Populate populate = Populate::kEager,
                      const std::function<bool()>& has_closed = {});

  /// Returns another mapping of the same pages. Its descriptor is a copy; -1 if this one has none.
  Mapping copy() const;

  std::byte* data() const noexcept { return pages_.get(); }
  std::size_t size() const noexcept { return size_; }
  /// Returns the descriptor that others may open; -1 after close_descriptor() and for opened mappings.
  int descriptor() const noexcept { return fd_; }
  /// Closes the descriptor. Call it when every peer has opened it. The mapping remains.
  void close_descriptor() noexcept;

 private:
  std::shared_ptr<std::byte> pages_;  ///< Unmapped with the last Mapping of them in this process.
  std::size_t size_ = 0;
  int fd_ = -1;
};

}  // namespace ddpkit::shm
