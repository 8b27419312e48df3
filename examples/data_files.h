// Tier 0: the standard library only. Reads the files of data sets.
#pragma once

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include <ddpkit/error.h>

namespace data_files {

namespace fs = std::filesystem;

inline std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

/// Returns the part of `name` before the extension `ending`, in any case. Empty if `name` ends differently.
inline std::string without_ending(const std::string& name, std::string_view ending) {
  return lower(name).ends_with(ending) ? name.substr(0, name.size() - ending.size()) : "";
}

/// macOS stores attributes of NAME in ._NAME on other file systems (AppleDouble, RFC 1740). These files hold no data.
inline bool is_apple_double(const fs::path& path) {
  if (!path.filename().string().starts_with("._")) return false;
  std::string magic(4, 0);
  return std::ifstream(path, std::ios::binary).read(magic.data(), 4) && magic == std::string("\0\5\x16\7", 4);
}

/// Returns the entries of `folder`, sorted, without AppleDouble files. Throws InvalidArgument if the system reports an
/// error.
inline std::vector<fs::path> entries(const fs::path& folder) {
  std::vector<fs::path> paths;
  try {
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (!is_apple_double(entry.path())) paths.push_back(entry.path());
    }
  } catch (const fs::filesystem_error& error) {
    throw ddpkit::InvalidArgument("cannot read the folder " + folder.string() + ": " + error.code().message());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

/// Returns the file with the name of `path` in any case; `path` if there is none. Throws InvalidArgument if there are
/// two.
inline fs::path in_any_case(const fs::path& path) {
  std::error_code none;
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  if (!fs::is_directory(folder, none)) return path;
  const std::string name = lower(path.filename().string());
  std::vector<fs::path> found;
  for (const fs::path& entry : entries(folder)) {
    if (lower(entry.filename().string()) == name) found.push_back(entry);
  }
  if (found.size() > 1)
    throw ddpkit::InvalidArgument(found[0].string() + " and " + found[1].string() +
                                  " differ in capitals only: remove one");
  return found.empty() ? path : path.parent_path() / found[0].filename();
}

/// Removes a UTF-8 byte-order mark.
inline std::string_view without_mark(std::string_view text) {
  constexpr std::string_view kMark = "\xEF\xBB\xBF";
  return text.starts_with(kMark) ? text.substr(kMark.size()) : text;
}

/// Reads a text file without its byte-order mark. Throws InvalidArgument.
inline std::string read_text(const fs::path& path) {
  std::error_code none;
  if (!fs::exists(path, none)) throw ddpkit::InvalidArgument("there is no file " + path.string());
  if (!fs::is_regular_file(path, none)) throw ddpkit::InvalidArgument(path.string() + " is not a file");
  std::ifstream file(path, std::ios::binary);
  std::string text;
  if (file) text.assign(std::istreambuf_iterator<char>(file), {});
  if (!file) throw ddpkit::InvalidArgument("cannot read " + path.string());
  return std::string(without_mark(text));
}

}  // namespace data_files
