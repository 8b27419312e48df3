#include <ddpkit/train/atomic_file.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/error.h>

namespace ddpkit::train {
namespace {

// A rename is durable only after a sync of the folder. Some file systems cannot sync a folder: this loses only
// durability, so it is not an error.
void sync_folder_of(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  (void)::fsync(descriptor);
  ::close(descriptor);
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)), temporary_(path_) {
  std::error_code none;
  if (std::filesystem::exists(path_, none) && !std::filesystem::is_regular_file(path_, none))
    throw InvalidArgument(fmt::format("{} is no plain file, which another could replace", path_.string()));
  temporary_ += ".tmp";
  while (descriptor_ < 0) {
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor_ < 0) fail("create");
    // File systems without locks return other errors.
    const bool is_taken = ::flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    // Another writer may have renamed the file since open().
    if (is_taken || !is_temporary()) ::close(std::exchange(descriptor_, -1));
    if (is_taken)
      throw InvalidArgument(fmt::format(
          "{} is being written by another process or thread; write it on one rank, as in `if (group.rank() == 0)`",
          path_.string()));
  }
  if (::ftruncate(descriptor_, 0) != 0) {
    const int reason = errno;
    ::close(std::exchange(descriptor_, -1));
    errno = reason;
    fail("write");
  }
}

bool AtomicFile::is_temporary() const {
  struct stat ours = {}, named = {};
  if (::fstat(descriptor_, &ours) != 0) return true;
  if (::stat(temporary_.c_str(), &named) != 0) return errno != ENOENT;
  return ours.st_ino == named.st_ino && ours.st_dev == named.st_dev;
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  ::unlink(temporary_.c_str());
  ::close(descriptor_);
}

void AtomicFile::fail(const char* what) const {
  const std::string reason = std::generic_category().message(errno);
  throw Error(fmt::format("cannot {} {}: {}; {} is as it was", what, temporary_.string(), reason, path_.string()));
}

void AtomicFile::write(const void* data, std::size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, next, bytes);
    if (written < 0) {
      if (errno == EINTR) continue;
      fail("write");
    }
    next += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void AtomicFile::commit() {
  if (::fsync(descriptor_) != 0) fail("write");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename");
  ::close(std::exchange(descriptor_, -1));
  sync_folder_of(path_);
}

void AtomicFile::commit_as(const std::filesystem::path& name) {
  if (::fsync(descriptor_) != 0) fail("write");
  give_name(temporary_, name);
}

void AtomicFile::give_name(const std::filesystem::path& path, const std::filesystem::path& name) {
  std::filesystem::path second = name;
  second += ".tmp";
  ::unlink(second.c_str());
  if (::link(path.c_str(), second.c_str()) != 0) {
    // Some file systems have no hard links.
    AtomicFile copy(name);
    std::ifstream file(path, std::ios::binary);
    std::vector<char> block(std::size_t{1} << 20);
    while (file.read(block.data(), static_cast<std::streamsize>(block.size())), file.gcount() > 0)
      copy.write(block.data(), static_cast<std::size_t>(file.gcount()));
    if (!file.eof()) throw Error(fmt::format("cannot read {}", path.string()));
    copy.commit();
    return;
  }
  // If both names are links to the same file, rename() does not remove the first name.
  if (::rename(second.c_str(), name.c_str()) != 0) {
    const std::string reason = std::generic_category().message(errno);
    ::unlink(second.c_str());
    throw Error(fmt::format("cannot rename {} to {}: {}", second.string(), name.string(), reason));
  }
  ::unlink(second.c_str());
  sync_folder_of(name);
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

}  // namespace ddpkit::train
