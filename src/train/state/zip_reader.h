// Tier 0. The records of a torch archive.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>

#include "train/state/input_file.h"

namespace ddpkit::train {

/// Reads the zip files that torch writes: uncompressed, all records in one folder. Checks the checksum of every record.
/// LibTorch's reader (caffe2/serialize/inline_container.h) is built without this check, so a flipped bit would change a
/// weight.
class ZipReader {
 public:
  /// Every member function throws BadFile.
  explicit ZipReader(const std::filesystem::path& path);

  bool has(const std::string& record) const { return entries_.contains(record); }
  /// `record`: without the folder's name.
  std::uint64_t size_of(const std::string& record) const { return entry(record).size; }
  void read(const std::string& record, void* destination) const;
  std::string read(const std::string& record) const;

 private:
  struct Entry {
    std::uint64_t header = 0;  ///< Offset of the local header.
    std::uint64_t size = 0;
    std::uint32_t checksum = 0;
  };

  const Entry& entry(const std::string& record) const;
  std::uint64_t data_of(const std::string& record, const Entry& entry) const;
  static void check(const std::string& record, const Entry& entry, const void* data);

  InputFile file_;
  std::string folder_;
  std::map<std::string, Entry> entries_;
};

}  // namespace ddpkit::train
