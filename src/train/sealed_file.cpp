#include "train/sealed_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <system_error>

#include <ddpkit/error.h>

#include "train/state/crc32.h"

namespace ddpkit::train {
namespace {

constexpr std::string_view kMark = "ddpkit crc32c ";
constexpr std::size_t kSealBytes = kMark.size() + 8;

}  // namespace

void Seal::pass_on(const void* data, std::size_t bytes) {
  checksum_ = crc32c(data, bytes, checksum_);
  sink_(data, bytes);
}

void Seal::write(const void* data, std::size_t bytes) {
  const char* next = static_cast<const char*>(data);
  if (bytes >= held_.size()) {
    if (held_bytes_ > 0) pass_on(held_.data(), held_bytes_);
    held_bytes_ = held_.size();
    if (bytes > held_bytes_) pass_on(next, bytes - held_bytes_);
    std::copy_n(next + bytes - held_bytes_, held_bytes_, held_.begin());
    return;
  }
  for (; bytes > 0; --bytes, ++next) {
    if (held_bytes_ == held_.size()) {
      pass_on(held_.data(), 1);
      held_[0] = held_[1];
      --held_bytes_;
    }
    held_[held_bytes_++] = *next;
  }
}

void Seal::finish() {
  const std::array<char, 2> length = {static_cast<char>(kSealBytes), 0};
  pass_on(length.data(), length.size());
  const std::string seal = fmt::format("{}{:08x}", kMark, checksum_);
  sink_(seal.data(), seal.size());
}

std::string read_file_bytes(const std::filesystem::path& path, std::string_view what) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    throw InvalidArgument(fmt::format("there is no {} {}", what, path.string()));
  std::ifstream file(path, std::ios::binary);
  std::string bytes;
  if (file) bytes.assign(std::istreambuf_iterator<char>(file), {});
  if (!file) throw InvalidArgument(fmt::format("cannot read the {} {}", what, path.string()));
  return bytes;
}

SealState check_seal(std::string_view bytes) {
  if (bytes.size() < kSealBytes || bytes.substr(bytes.size() - kSealBytes, kMark.size()) != kMark)
    return SealState::kNone;
  const std::string_view sealed = bytes.substr(0, bytes.size() - kSealBytes);
  const std::string expected = fmt::format("{:08x}", crc32c(sealed.data(), sealed.size()));
  return bytes.substr(bytes.size() - expected.size()) == expected ? SealState::kWhole : SealState::kBroken;
}

}  // namespace ddpkit::train
