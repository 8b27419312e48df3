#include "output_file.h"

#include <filesystem>
#include <fstream>
#include <system_error>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/train/atomic_file.h>

namespace ddpkit::cli {

void check_output(const std::string& path) {
  const bool was_there = std::filesystem::exists(path);
  if (!std::ofstream(path, std::ios::app)) throw InvalidArgument(fmt::format("cannot write {}", path));
  if (!was_there) std::filesystem::remove(path);
}

void write_output(const std::string& path, const std::string& text) {
  std::error_code error;
  if (std::filesystem::exists(path, error) && !std::filesystem::is_regular_file(path, error)) {
    std::ofstream file(path);
    if (!(file << text).flush()) throw Error(fmt::format("cannot write {}", path));
    return;
  }
  // Writes to the target of a symbolic link; the link stays.
  const std::filesystem::path file = std::filesystem::weakly_canonical(path, error);
  train::AtomicFile whole(error ? std::filesystem::path(path) : file);
  whole.write(text.data(), text.size());
  whole.commit();
}

}  // namespace ddpkit::cli
