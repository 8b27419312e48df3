// Implements the part of PKWARE's APPNOTE.TXT 6.3.10 that torch uses.
#include "train/state/zip_reader.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include <fmt/format.h>

#include "train/state/crc32.h"

namespace ddpkit::train {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are read as they lie in the file");

constexpr std::uint32_t kLocalHeader = 0x04034b50, kCentralHeader = 0x02014b50, kEnd = 0x06054b50;
constexpr std::uint32_t kZip64End = 0x06064b50, kZip64Locator = 0x07064b50;
constexpr std::size_t kEndBytes = 22, kZip64EndBytes = 56, kZip64LocatorBytes = 20, kCentralBytes = 46,
                      kLocalBytes = 30;
constexpr std::size_t kLongestComment = 0xffff;
constexpr std::uint16_t kZip64Field = 1;
constexpr std::uint32_t kInZip64 = 0xffffffff;  // The value is in the zip64 field.

template <class T>
T number(std::string_view bytes, std::size_t offset) {
  if (offset > bytes.size() || sizeof(T) > bytes.size() - offset) throw BadFile("its directory is damaged");
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

std::string_view part(std::string_view bytes, std::size_t offset, std::size_t size) {
  if (offset > bytes.size() || size > bytes.size() - offset) throw BadFile("its directory is damaged");
  return bytes.substr(offset, size);
}

struct Directory {
  std::uint64_t offset = 0, bytes = 0;
};

/// Finds the directory from the end of the file.
Directory find_directory(const InputFile& file) {
  const std::uint64_t tail_bytes = std::min<std::uint64_t>(file.size(), kEndBytes + kLongestComment);
  const std::uint64_t tail_begin = file.size() - tail_bytes;
  const std::string tail = file.read(tail_begin, tail_bytes);
  constexpr std::string_view kEndMark = "PK\x05\x06";
  const std::size_t end = tail.rfind(kEndMark);
  if (end == std::string::npos || tail.size() - end < kEndBytes)
    throw BadFile(fmt::format("it is truncated: it ends after {} bytes, before its directory", file.size()));
  const std::size_t comment = number<std::uint16_t>(tail, end + 20);
  if (tail.size() - end - kEndBytes != comment) throw BadFile("it is truncated, or bytes have been added to its end");
  Directory directory{number<std::uint32_t>(tail, end + 16), number<std::uint32_t>(tail, end + 12)};
  if (tail_begin + end >= kZip64LocatorBytes) {
    const std::string locator = file.read(tail_begin + end - kZip64LocatorBytes, kZip64LocatorBytes);
    if (number<std::uint32_t>(locator, 0) == kZip64Locator) {
      const std::string zip64 = file.read(number<std::uint64_t>(locator, 8), kZip64EndBytes);
      if (number<std::uint32_t>(zip64, 0) != kZip64End) throw BadFile("its directory is damaged");
      directory = {number<std::uint64_t>(zip64, 48), number<std::uint64_t>(zip64, 40)};
    }
  }
  return directory;
}

}  // namespace

ZipReader::ZipReader(const std::filesystem::path& path) : file_(path) {
  if (file_.size() < 4 || number<std::uint32_t>(file_.read(0, 4), 0) != kLocalHeader)
    throw BadFile("it is no zip archive, which torch.save has written since 1.6");
  const Directory place = find_directory(file_);
  const std::string directory = file_.read(place.offset, place.bytes);
  std::uint64_t total = 0;
  for (std::size_t at = 0; at < directory.size();) {
    if (number<std::uint32_t>(directory, at) != kCentralHeader) throw BadFile("its directory is damaged");
    const std::size_t name_bytes = number<std::uint16_t>(directory, at + 28);
    const std::size_t extra_bytes = number<std::uint16_t>(directory, at + 30);
    const std::size_t comment_bytes = number<std::uint16_t>(directory, at + 32);
    const std::string_view name = part(directory, at + kCentralBytes, name_bytes);
    std::string_view extra = part(directory, at + kCentralBytes + name_bytes, extra_bytes);
    if (number<std::uint16_t>(directory, at + 10) != 0)
      throw BadFile(fmt::format("its record {} is compressed, which torch.save does not do", name));
    Entry entry{.header = number<std::uint32_t>(directory, at + 42),
                .size = number<std::uint32_t>(directory, at + 24),
                .checksum = number<std::uint32_t>(directory, at + 16)};
    while (extra.size() >= 4) {
      const std::size_t bytes = number<std::uint16_t>(extra, 2);
      const std::string_view field = part(extra, 4, bytes);
      if (number<std::uint16_t>(extra, 0) == kZip64Field) {
        std::size_t next = 0;
        if (entry.size == kInZip64) {
          entry.size = number<std::uint64_t>(field, next);
          next += 8;
        }
        if (number<std::uint32_t>(directory, at + 20) == kInZip64) next += 8;
        if (entry.header == kInZip64) entry.header = number<std::uint64_t>(field, next);
      }
      extra.remove_prefix(4 + bytes);
    }
    const std::size_t slash = name.find('/');
    if (slash == std::string_view::npos) throw BadFile(fmt::format("its record {} is in no folder", name));
    if (entries_.empty()) folder_ = name.substr(0, slash);
    if (name.substr(0, slash) != folder_) throw BadFile("its records are in several folders");
    if (!entries_.emplace(name.substr(slash + 1), entry).second)
      throw BadFile(fmt::format("it has two records {}", name));
    // Overlapping records would need more memory than the length of the file.
    if (entry.size > file_.size() || (total += entry.size) > file_.size())
      throw BadFile("it is damaged: its records are together longer than the file");
    at += kCentralBytes + name_bytes + extra_bytes + comment_bytes;
  }
}

const ZipReader::Entry& ZipReader::entry(const std::string& record) const {
  const auto found = entries_.find(record);
  if (found == entries_.end()) throw BadFile(fmt::format("it has no record {}", record));
  return found->second;
}

std::uint64_t ZipReader::data_of(const std::string& record, const Entry& entry) const {
  const std::string header = file_.read(entry.header, kLocalBytes);
  const std::size_t name_bytes = number<std::uint16_t>(header, 26), extra_bytes = number<std::uint16_t>(header, 28);
  if (number<std::uint32_t>(header, 0) != kLocalHeader ||
      file_.read(entry.header + kLocalBytes, name_bytes) != folder_ + "/" + record)
    throw BadFile(fmt::format("it is damaged where its record {} begins", record));
  return entry.header + kLocalBytes + name_bytes + extra_bytes;
}

void ZipReader::check(const std::string& record, const Entry& entry, const void* data) {
  // torch.serialization.set_crc32_options(False) writes zeros.
  if (entry.checksum != 0 && crc32(data, entry.size) != entry.checksum)
    throw BadFile(fmt::format("it is damaged: the checksum of its record {} differs", record));
}

void ZipReader::read(const std::string& record, void* destination) const {
  const Entry& entry = this->entry(record);
  file_.read(data_of(record, entry), destination, entry.size);
  check(record, entry, destination);
}

std::string ZipReader::read(const std::string& record) const {
  const Entry& entry = this->entry(record);
  std::string bytes = file_.read(data_of(record, entry), entry.size);
  check(record, entry, bytes.data());
  return bytes;
}

}  // namespace ddpkit::train
