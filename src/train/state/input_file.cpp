#include "train/state/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include <fmt/format.h>

namespace ddpkit::train {
namespace {

std::string reason() { return std::generic_category().message(errno); }

}  // namespace

InputFile::InputFile(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a named pipe must not wait for a writer.
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat status = {};
  if (descriptor_ < 0) throw BadFile(reason());
  if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor_);
    throw BadFile("it is no regular file");
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
}

InputFile::~InputFile() { ::close(descriptor_); }

void InputFile::check(std::uint64_t offset, std::uint64_t bytes) const {
  if (offset > size_ || bytes > size_ - offset)
    throw BadFile(fmt::format("it is truncated or damaged: of its {} bytes, {} from byte {} on were to be read", size_,
                              bytes, offset));
}

void InputFile::read(std::uint64_t offset, void* destination, std::uint64_t bytes) const {
  check(offset, bytes);
  constexpr std::uint64_t kLargest = std::uint64_t{1} << 30;  // One system call reads at most 2 GiB.
  char* next = static_cast<char*>(destination);
  while (bytes > 0) {
    const ssize_t got = ::pread(descriptor_, next, std::min(bytes, kLargest), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw BadFile(reason());
    if (got == 0) throw BadFile("it became shorter while it was read");
    next += got;
    offset += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::uint64_t>(got);
  }
}

std::string InputFile::read(std::uint64_t offset, std::uint64_t bytes) const {
  check(offset, bytes);  // Check before allocation.
  std::string text(bytes, '\0');
  read(offset, text.data(), bytes);
  return text;
}

}  // namespace ddpkit::train
