// Every data format that the trainers read: a generator written from the format's specification, and the reader.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/folder.h"

namespace ddpkit::testing {

using Path = std::filesystem::path;

/// A change of a file that must change what is read, or be refused.
struct Edit {
  std::string named;  ///< What a refusal names: the key or its value.
  std::string file;   ///< Within the folder.
  std::string from, to;
};

struct Format {
  std::string name;
  /// Writes a random data set. Returns what a reader must make of it: one line per row, recording or video.
  std::function<std::string(const Path& folder, std::mt19937& random)> write;
  /// What the reader makes of the folder, in the same form. Throws what the reader throws.
  std::function<std::string(const Path& folder)> read;
  std::vector<std::string> text_files;  ///< Endings of the files that hold text.
  std::vector<Edit> edits;
};

Format ucihar_format();
Format ts_format();
Format prices_format();
Format librispeech_format();
Format manifest_format();
Format video_format();

inline int drawn(std::mt19937& random, int least, int most) {
  return std::uniform_int_distribution(least, most)(random);
}

}  // namespace ddpkit::testing
