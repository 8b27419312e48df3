#include "train/checkpoint_files.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>
#include <ddpkit/train/atomic_file.h>
#include <ddpkit/train/checkpoint.h>
#include <ddpkit/train/text.h>

#include "train/checkpoint_archive.h"
#include "train/checkpoint_shards.h"

namespace ddpkit::train {
namespace {

namespace fs = std::filesystem;

fs::path numbered(const fs::path& path, std::int64_t step) {
  return path.parent_path() / fmt::format("{}-{}{}", path.stem().string(), step, path.extension().string());
}

// Returns the files START + number + END beside `path`, the highest number first.
std::vector<std::pair<std::int64_t, fs::path>> numbered_files(const fs::path& path, const std::string& start,
                                                              const std::string& end) {
  std::vector<std::pair<std::int64_t, fs::path>> found;
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(start) || !name.ends_with(end) || name.size() <= start.size() + end.size()) continue;
    std::int64_t step = 0;
    const std::string_view number(name.data() + start.size(), name.size() - start.size() - end.size());
    if (parse_number(number, step) && step >= 0) found.emplace_back(step, entry.path());
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

// Returns the files named by numbered(), newest first.
std::vector<std::pair<std::int64_t, fs::path>> older_ones(const fs::path& path) {
  return numbered_files(path, path.stem().string() + "-", path.extension().string());
}

/// Throws InvalidArgument if the file or one of its shards is damaged.
void check_checkpoint(const fs::path& path) {
  check_shards(path, shards_of_archive(path.string(), read_file_bytes(path, "checkpoint")));
}

}  // namespace

void write_checkpoint_files(const CheckpointFiles& files, const std::function<void(const Sink&)>& write) {
  AtomicFile file(files.path);
  Seal seal([&](const void* data, std::size_t bytes) { file.write(data, bytes); });
  write([&](const void* data, std::size_t bytes) { seal.write(data, bytes); });
  seal.finish();
  // `path` is written last, so it is never newer than the other names.
  if (files.best) file.commit_as(*files.best);
  const std::string best_of_epoch = fmt::format("{}{}.pt", files.best_epoch_stem, files.best_epoch);
  if (!files.best_epoch_stem.empty()) file.commit_as(files.path.parent_path() / best_of_epoch);
  if (files.keep > 1) file.commit_as(numbered(files.path, files.step));
  file.commit();
  if (!files.best_epoch_stem.empty()) {
    std::error_code ignored;
    for (const auto& [epoch, path] : numbered_files(files.path, files.best_epoch_stem, ".pt")) {
      if (epoch != files.best_epoch) fs::remove(path, ignored);
    }
  }
  if (files.keep == 1) return;
  const auto older = older_ones(files.path);
  // Removes checkpoints of later steps: the run abandoned them when it resumed from an earlier step.
  std::size_t kept = 0;
  for (const auto& [step, path] : older) {
    std::error_code ignored;
    if (step > files.step || ++kept > static_cast<std::size_t>(files.keep)) fs::remove(path, ignored);
  }
}

std::vector<std::string> shards_beside(const fs::path& path, const fs::path& best) {
  std::vector<fs::path> checkpoints{path, best};
  for (const auto& [step, older] : older_ones(path)) checkpoints.push_back(older);
  std::vector<std::string> names;
  for (const fs::path& checkpoint : checkpoints) {
    try {
      const auto shards = shards_of_archive(checkpoint.string(), read_file_bytes(checkpoint, "checkpoint"));
      names.insert(names.end(), shards.begin(), shards.end());
    } catch (const InvalidArgument&) {
      continue;
    }
  }
  return names;
}

std::optional<fs::path> newest_good_checkpoint(const fs::path& path) {
  for (const auto& [step, older] : older_ones(path)) {
    try {
      check_checkpoint(older);
      return older;
    } catch (const InvalidArgument&) {
      continue;
    }
  }
  return std::nullopt;
}

bool recover_checkpoint(const std::filesystem::path& path) {
  std::string damage;
  try {
    check_checkpoint(path);
    return false;
  } catch (const InvalidArgument& error) {
    if (std::error_code ignored; !fs::exists(path, ignored)) return false;
    damage = error.what();
  }
  const std::optional<fs::path> older = newest_good_checkpoint(path);
  if (!older) return false;
  fs::path damaged = path;
  damaged += ".damaged";
  // Each name refers to a complete file at all times: first link the damaged file to a second name, then replace the
  // first name.
  AtomicFile::give_name(path, damaged);
  AtomicFile::give_name(*older, path);
  log_line(
      fmt::format("{}; resuming from {} (the damaged one is kept as {})", damage, older->string(), damaged.string()));
  return true;
}

}  // namespace ddpkit::train
