// Tier 0: the standard library only.
#pragma once

#include <stdlib.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

/// A folder that appears atomically. commit() gives path() its final name; without commit(), the destructor removes it.
/// Until then it is in a private folder next to the name, NAME.partial-XXXXXX.
class NewFolder {
 public:
  /// `name` must not exist, or be an empty folder. Throws std::filesystem::filesystem_error.
  explicit NewFolder(const std::filesystem::path& name) : name_(name.has_filename() ? name : name.parent_path()) {
    if (name_.has_parent_path()) std::filesystem::create_directories(name_.parent_path());
    std::string own = name_.string() + ".partial-XXXXXX";
    if (!::mkdtemp(own.data()))
      throw std::filesystem::filesystem_error("mkdtemp", name_, std::error_code(errno, std::generic_category()));
    own_ = own;
    // mkdtemp()'s folder is private; the content must have the user's default permissions.
    path_ = own_ / "content";
    try {
      std::filesystem::create_directory(path_);
    } catch (...) {
      remove();
      throw;
    }
  }
  ~NewFolder() { remove(); }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const std::filesystem::path& path() const noexcept { return path_; }
  /// Throws std::filesystem::filesystem_error.
  void commit() { std::filesystem::rename(path_, name_); }

 private:
  void remove() noexcept {
    std::error_code none;
    std::filesystem::remove_all(own_, none);
  }

  std::filesystem::path name_, own_, path_;
};
