#include "train/training_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/train/atomic_file.h>

namespace ddpkit::train {
namespace {

constexpr std::chrono::seconds kPatience(5);
constexpr std::chrono::milliseconds kBetweenTries(50);

struct OpenFolder {
  explicit OpenFolder(const std::filesystem::path& folder)
      : descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {}
  ~OpenFolder() {
    if (descriptor >= 0) ::close(descriptor);
  }
  OpenFolder(const OpenFolder&) = delete;
  OpenFolder& operator=(const OpenFolder&) = delete;

  int descriptor;  ///< Owns the lock: closing the descriptor releases it.
};

}  // namespace

std::shared_ptr<const void> lock_folder(const std::filesystem::path& folder) {
  auto open = std::make_shared<OpenFolder>(folder);
  if (open->descriptor < 0) return open;
  const auto limit = std::chrono::steady_clock::now() + kPatience;
  while (::flock(open->descriptor, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) break;  // ENOLCK, EOPNOTSUPP, on NFS EBADF: the file system has no such locks.
    if (std::chrono::steady_clock::now() >= limit)
      throw InvalidArgument(
          fmt::format("another process trains into {}: wait for its end, or use another folder", folder.string()));
    std::this_thread::sleep_for(kBetweenTries);
  }
  return open;
}

void wait_for_writer(const std::filesystem::path& path) {
  const auto limit = std::chrono::steady_clock::now() + kPatience;
  for (;; std::this_thread::sleep_for(kBetweenTries)) {
    try {
      const AtomicFile probe(path);
      return;
    } catch (const InvalidArgument&) {
      if (std::chrono::steady_clock::now() >= limit) throw;
    }
  }
}

}  // namespace ddpkit::train
