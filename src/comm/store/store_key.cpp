#include "comm/store/store_key.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/store/wire.h"

namespace ddpkit::store {
namespace {

constexpr std::string_view kPassMagic = "ddpkit-pass-1";
constexpr std::size_t kLeastBytes = 32, kMostBytes = 4096;
constexpr int kSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;

/// Returns the first bytes of the file. Does not move its position, which the ranks share.
std::string read_bytes(int fd) {
  std::array<char, kMostBytes + 1> buffer{};
  std::size_t bytes = 0;
  for (ssize_t got = 1; got > 0 && bytes < buffer.size();) {
    got = ::pread(fd, buffer.data() + bytes, buffer.size() - bytes, static_cast<off_t>(bytes));
    if (got < 0 && errno == EINTR)
      got = 1;
    else if (got > 0)
      bytes += static_cast<std::size_t>(got);
  }
  return {buffer.data(), bytes};
}

}  // namespace

Digest read_key_file(const std::string& file) {
  const int fd = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat info {};
  if (fd < 0 || ::fstat(fd, &info) != 0) {
    const int error = errno;
    if (fd >= 0) ::close(fd);
    throw InvalidArgument(fmt::format("cannot read the key file {}: {}", file, std::strerror(error)));
  }
  const std::string bytes = S_ISREG(info.st_mode) ? read_bytes(fd) : std::string();
  ::close(fd);
  if (!S_ISREG(info.st_mode)) throw InvalidArgument(fmt::format("the key file {} is not a regular file", file));
  if ((info.st_mode & 077) != 0)
    throw InvalidArgument(
        fmt::format("the key file {} has mode {:04o}, so other users can access it; run: chmod 600 {}", file,
                    info.st_mode & 07777, file));
  if (bytes.size() < kLeastBytes || bytes.size() > kMostBytes)
    throw InvalidArgument(
        fmt::format("the key file {} has {} bytes, but must have {} to {}; create it with: (umask 077; head -c 32 "
                    "/dev/urandom >{})",
                    file, info.st_size, kLeastBytes, kMostBytes, file));
  return sha256(bytes);
}

PassDescriptor::PassDescriptor(const StorePass& pass)
    : fd_(::memfd_create("ddpkit:key", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
  const std::string text =
      Writer(Status::kOk).text(kPassMagic).text(bytes_of(pass.key)).text(pass.run).number(pass.port).finish();
  if (fd_ >= 0 && ::write(fd_, text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
      ::fcntl(fd_, F_ADD_SEALS, kSeals) == 0)
    return;
  const int error = errno;
  if (fd_ >= 0) ::close(fd_);
  throw Error(fmt::format("no memory file for the key of the store: {}", std::strerror(error)));
}

PassDescriptor::~PassDescriptor() { ::close(fd_); }

StorePass read_pass(int descriptor) {
  const int seals = ::fcntl(descriptor, F_GET_SEALS);
  if (seals >= 0 && (seals & kSeals) == kSeals) {
    const std::string text = read_bytes(descriptor);
    Reader fields(text);
    fields.code();
    const std::string_view magic = fields.text(), key = fields.text(), run = fields.text();
    const std::int64_t port = fields.number();
    if (fields.ok() && magic == kPassMagic && key.size() == sizeof(Digest))
      return {.key = digest_of(key), .run = std::string(run), .port = static_cast<std::uint16_t>(port)};
  }
  throw InvalidArgument(fmt::format(
      "{} is {}, but descriptor {} does not hold the key of the run: a program between `ddpkit run` and this "
      "rank has closed it (in Python, start the rank with close_fds=False), or the variable comes from "
      "another run (unset {})",
      kKeyDescriptorVariable, descriptor, descriptor, kKeyDescriptorVariable));
}

}  // namespace ddpkit::store
