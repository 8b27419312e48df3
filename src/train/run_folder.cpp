#include <ddpkit/train/run_folder.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include <fmt/format.h>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>
#include <ddpkit/train/atomic_file.h>
#include <ddpkit/train/text.h>
#include <ddpkit/train/together.h>

#include "train/checkpoint_files.h"
#include "train/training_lock.h"

namespace ddpkit::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Returns "a run with lr 0.01 (this one: 0.001)" for the first key that differs; empty if all are equal.
std::string first_difference(const json& there, const json& here, const std::vector<std::string>& may_differ) {
  json all_keys = there;
  all_keys.update(here);
  for (const auto& item : all_keys.items()) {
    const std::string& key = item.key();
    if (std::find(may_differ.begin(), may_differ.end(), key) != may_differ.end()) continue;
    const json before = there.value(key, json());
    const json now = here.value(key, json());
    if (before != now) return fmt::format("a run with {} {} (this one: {})", key, before.dump(), now.dump());
  }
  return {};
}

// Returns the info of the checkpoint from which the run will resume.
CheckpointInfo examine(const std::filesystem::path& checkpoint, const std::string& config,
                       const RunFolderOptions& options) {
  const std::string folder = checkpoint.parent_path().string();
  const json here = json::parse(config);
  CheckpointInfo info;
  json there;
  try {
    info = read_checkpoint_info(checkpoint);
    there = json::parse(info.config);
    if (!there.is_object()) throw InvalidArgument(fmt::format("the checkpoint {} has no config", checkpoint.string()));
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("{}: use another folder, or overwrite it", error.what()));
  } catch (const json::exception&) {
    throw InvalidArgument(fmt::format("the config in the checkpoint {} is damaged: use another folder, or overwrite it",
                                      checkpoint.string()));
  }
  const std::string difference = first_difference(there, here, options.may_differ);
  if (difference.empty()) return info;
  throw InvalidArgument(
      fmt::format("cannot resume: {} already holds {}: use another folder, or overwrite the run", folder, difference));
}

std::int64_t number_in_environment(const char* name) {
  std::int64_t value = 0;
  const char* text = std::getenv(name);
  return text && parse_number(text, value) ? value : 0;
}

// Returns whether to replace the existing checkpoint. A launcher restarts a failed job with the same command, including
// --overwrite. Checkpoints that the job has already written must not be replaced. The job wrote the checkpoint if a
// mark file with the job's name is older than the checkpoint.
bool replaces(const fs::path& checkpoint, bool overwrite) {
  fs::path mark = checkpoint;
  mark += ".overwrite";
  std::error_code error;
  const std::int64_t restarts = number_in_environment("TORCHELASTIC_RESTART_COUNT");
  if (!overwrite || (restarts == 0 && number_in_environment("TORCHELASTIC_MAX_RESTARTS") == 0)) {
    fs::remove(mark, error);
    return overwrite;
  }
  const char* variable = std::getenv("TORCHELASTIC_RUN_ID");
  const std::string job = variable ? variable : "none";
  std::string marked;
  if (restarts > 0 && std::getline(std::ifstream(mark), marked) && marked == job) {
    const fs::file_time_type begun = fs::last_write_time(mark, error), written = fs::last_write_time(checkpoint, error);
    return error || begun >= written;
  }
  std::ofstream(mark, std::ios::trunc) << job << '\n';
  return true;
}

// Returns the run in the folder, if any.
std::optional<CheckpointInfo> find_run(const fs::path& checkpoint, const std::string& config,
                                       const RunFolderOptions& options) {
  std::error_code error;
  if (fs::exists(checkpoint, error)) {
    try {
      return examine(checkpoint, config, options);
    } catch (const InvalidArgument&) {
      if (!recover_checkpoint(checkpoint)) throw;
      return examine(checkpoint, config, options);
    }
  }
  const std::optional<fs::path> newest = newest_good_checkpoint(checkpoint);
  if (!newest) return std::nullopt;
  CheckpointInfo info = examine(*newest, config, options);
  AtomicFile::give_name(*newest, checkpoint);
  log_line(fmt::format("{} is missing; resuming from {}", checkpoint.string(), newest->string()));
  return info;
}

// Returns the highest N of the folders run-N; 0 if there are none.
std::int64_t last_run(const fs::path& runs) {
  std::int64_t last = 0, number = 0;
  std::error_code error;
  for (auto entry = fs::directory_iterator(runs, error); !error && entry != decltype(entry)(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with("run-") && parse_number(name.substr(4), number)) last = std::max(last, number);
  }
  return last;
}

fs::path runs_of(const std::string& program) { return fs::path("checkpoints") / program; }

}  // namespace

fs::path default_run_folder(const std::string& program, bool resume) {
  if (resume || number_in_environment("TORCHELASTIC_RESTART_COUNT") > 0) {
    if (const fs::path last = last_run_folder(program); !last.empty()) return last;
    if (resume) throw InvalidArgument(fmt::format("cannot resume: {} holds no run", runs_of(program).string()));
  }
  const fs::path runs = runs_of(program);
  std::error_code error;
  fs::create_directories(runs, error);
  for (std::int64_t number = last_run(runs) + 1; !error; ++number) {
    const fs::path folder = runs / fmt::format("run-{}", number);
    if (fs::create_directory(folder, error)) return folder;  // Not if another process has just created it.
  }
  throw InvalidArgument(fmt::format("cannot make a folder in {} ({}): name one with --save-dir, or use --no-save",
                                    runs.string(), error.message()));
}

fs::path last_run_folder(const std::string& program) {
  const std::int64_t last = last_run(runs_of(program));
  return last == 0 ? fs::path() : runs_of(program) / fmt::format("run-{}", last);
}

RunFolder open_run_folder(const std::filesystem::path& folder, const std::string& config,
                          const RunFolderOptions& options, const ProcessGroup& group) {
  RunFolder result{.checkpoint = folder / "checkpoint.pt", .to_resume = std::nullopt};
  run_together(group, [&] {
    if (group.rank() != 0) return;
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) throw InvalidArgument(fmt::format("cannot make the folder {}: {}", folder.string(), error.message()));
    result.lock = lock_folder(folder);
    if (!replaces(result.checkpoint, options.overwrite))
      result.to_resume = find_run(result.checkpoint, config, options);
    if (options.resume && !result.to_resume)
      throw InvalidArgument(fmt::format("cannot resume: {} holds no run", folder.string()));
    AtomicFile probe(result.checkpoint);
  });
  // Rank 0 broadcasts whether and from where to resume.
  std::string info;
  if (result.to_resume) {
    info =
        json{{"epoch", result.to_resume->epoch}, {"step", result.to_resume->step}, {"config", result.to_resume->config}}
            .dump();
  }
  info = broadcast_bytes(group, std::move(info));
  if (!info.empty()) {
    const json received = json::parse(info);
    result.to_resume = CheckpointInfo{
        .epoch = received["epoch"], .step = received["step"], .config = received["config"].get<std::string>()};
  }
  return result;
}

}  // namespace ddpkit::train
