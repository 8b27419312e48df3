#include <ddpkit/train/atomic_file.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/comm/error.h>

namespace ddpkit::train {

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)), temporary_(path_) {
  temporary_ += ".tmp";
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail("create");
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
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
  // The rename itself is durable only once the folder is. Some file systems cannot sync a folder: nothing is lost by
  // that but durability, so it is no error.
  const std::filesystem::path folder = path_.has_parent_path() ? path_.parent_path() : std::filesystem::path(".");
  const int folder_descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_descriptor < 0) return;
  (void)::fsync(folder_descriptor);
  ::close(folder_descriptor);
}

}  // namespace ddpkit::train
