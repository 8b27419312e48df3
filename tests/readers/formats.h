// The data formats of the trainers. Each has a generator, written from the format's specification, and the reader.
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

/// A change of a file. The reader must return a different result or throw.
struct Edit {
  std::string named;  ///< The text in the error: the key or its value.
  std::string file;   ///< Relative to the folder.
  std::string from, to;
};

struct Format {
  std::string name;
  /// Writes a random data set. Returns the expected result of the reader: one line per row, recording or video.
  std::function<std::string(const Path& folder, std::mt19937& random)> write;
  /// Returns the reader's result in the same form. Throws the reader's errors.
  std::function<std::string(const Path& folder)> read;
  std::vector<std::string> text_files;  ///< Extensions of text files.
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
