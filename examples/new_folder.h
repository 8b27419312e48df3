// Tier 0: the standard library only.
#pragma once

#include <stdlib.h>

#include <cerrno>
#include <filesystem>
#include <functional>
#include <string>
#include <system_error>

#include <ddpkit/error.h>

/// Creates the folder `name` with the files that fill(PATH) writes into PATH, atomically: until fill() returns, the
/// files are in a private folder next to the name, NAME.partial-XXXXXX. Throws InvalidArgument if `name` exists and is
/// not an empty folder, Error with the system's reason, and the errors of fill(). Then no file remains.
inline void write_new_folder(const std::filesystem::path& name,
                             const std::function<void(const std::filesystem::path& path)>& fill) {
  namespace fs = std::filesystem;
  if (fs::exists(name) && (!fs::is_directory(name) || !fs::is_empty(name)))
    throw ddpkit::InvalidArgument(name.string() + " exists and is not an empty folder: nothing was written");
  struct Removed {
    ~Removed() {
      std::error_code none;
      if (!path.empty()) fs::remove_all(path, none);
    }
    fs::path path;
  } own;
  try {
    const fs::path last = name.has_filename() ? name : name.parent_path();
    if (last.has_parent_path()) fs::create_directories(last.parent_path());
    std::string partial = last.string() + ".partial-XXXXXX";
    if (!::mkdtemp(partial.data()))
      throw fs::filesystem_error("mkdtemp", last, std::error_code(errno, std::generic_category()));
    own.path = partial;
    // mkdtemp()'s folder is private; the content must have the user's default permissions.
    fs::create_directory(own.path / "content");
    fill(own.path / "content");
    fs::rename(own.path / "content", last);
  } catch (const fs::filesystem_error& error) {
    throw ddpkit::Error("cannot write " + name.string() + ": " + error.code().message());
  }
}
