#include "video/clip_cache.h"

#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <system_error>

#include <fmt/format.h>

#include <ddpkit/error.h>

extern "C" {
#include <libavutil/mem.h>
#include <libavutil/murmur3.h>
}

namespace video {
namespace {

using Digest = std::array<std::uint8_t, 16>;

Digest murmur3(const void* data, std::size_t bytes) {
  const std::unique_ptr<AVMurMur3, void (*)(void*)> hash(av_murmur3_alloc(), av_free);
  av_murmur3_init(hash.get());
  av_murmur3_update(hash.get(), static_cast<const std::uint8_t*>(data), bytes);
  Digest digest{};
  av_murmur3_final(hash.get(), digest.data());
  return digest;
}

struct Closer {
  void operator()(std::FILE* file) const noexcept { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Closer>;

// File format: this magic, the digest of the pixels, the length of the key, the key, the pixels.
constexpr std::array<char, 8> kMagic = {'d', 'd', 'p', 'k', 'c', 'l', 'p', '1'};

std::string header_of(const std::string& key, const Digest& digest) {
  std::string header(kMagic.begin(), kMagic.end());
  header.append(reinterpret_cast<const char*>(digest.data()), digest.size());
  const auto length = static_cast<std::uint32_t>(key.size());
  for (int shift = 0; shift < 32; shift += 8) header += static_cast<char>(length >> shift);
  return header + key;
}

}  // namespace

ClipCache::ClipCache(std::filesystem::path folder, std::int64_t most_bytes, int processes)
    : folder_(std::move(folder)), bytes_left_(most_bytes) {
  try {
    std::filesystem::create_directories(folder_);
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      std::error_code gone;  // Another process may rename the file at this moment.
      const auto size = entry.file_size(gone);
      if (!gone) bytes_left_ -= static_cast<std::int64_t>(size);
    }
    bytes_left_ = bytes_left_ / processes;
  } catch (const std::filesystem::filesystem_error& error) {
    throw ddpkit::Error(fmt::format("cannot use {} as a cache: {}", folder_.string(), error.code().message()));
  }
}

std::filesystem::path ClipCache::file_of(const std::string& key) const {
  std::string name;
  for (const std::uint8_t byte : murmur3(key.data(), key.size())) name += fmt::format("{:02x}", byte);
  return folder_ / (name + ".clip");
}

bool ClipCache::read(const std::string& key, std::uint8_t* pixels, std::size_t bytes) {
  const std::filesystem::path path = file_of(key);
  const File file(std::fopen(path.c_str(), "rb"));
  if (!file) return false;
  std::string header(header_of(key, {}).size(), '\0');
  const bool whole = std::fread(header.data(), 1, header.size(), file.get()) == header.size() &&
                     std::fread(pixels, 1, bytes, file.get()) == bytes && std::fgetc(file.get()) == EOF;
  if (whole && header == header_of(key, murmur3(pixels, bytes))) {
    ++hits_;
    return true;
  }
  ++damaged_;
  std::error_code ignored;
  const auto size = std::filesystem::file_size(path, ignored);
  if (std::filesystem::remove(path, ignored) && size != static_cast<std::uintmax_t>(-1))
    bytes_left_ += static_cast<std::int64_t>(size);
  return false;
}

void ClipCache::write(const std::string& key, const std::uint8_t* pixels, std::size_t bytes) {
  const std::string header = header_of(key, murmur3(pixels, bytes));
  const auto size = static_cast<std::int64_t>(header.size() + bytes);
  if (bytes_left_.fetch_sub(size) < size) {
    bytes_left_ += size;
    return;
  }
  const std::filesystem::path path = file_of(key);
  std::filesystem::path temporary = path;
  temporary += fmt::format(".{}.{}.tmp", ::getpid(), written_++);
  File file(std::fopen(temporary.c_str(), "wb"));
  const bool written = file && std::fwrite(header.data(), 1, header.size(), file.get()) == header.size() &&
                       std::fwrite(pixels, 1, bytes, file.get()) == bytes && std::fflush(file.get()) == 0;
  file.reset();
  // No fsync: after a power failure, the checksum detects damage.
  std::error_code error;
  if (written) std::filesystem::rename(temporary, path, error);
  if (!written || error) {
    bytes_left_ += size;
    std::filesystem::remove(temporary, error);
  }
}

}  // namespace video
