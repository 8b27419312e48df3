#include "targets.h"

#include <array>

#include <ddpkit/error.h>
#include <ddpkit/train/checkpoint.h>
#include <ddpkit/train/options.h>
#include <ddpkit/train/safetensors.h>
#include <ddpkit/train/state_dict.h>

#include "asr/corpus.h"
#include "clstm_ppo/prices.h"
#include "estimate/profile_file.h"
#include "har/ts_format.h"
#include "har/ucihar.h"
#include "support/folder.h"
#include "video/trials.h"

namespace ddpkit::testing {
namespace {

using std::filesystem::path;

path file_of(const std::string& bytes, const path& folder, const char* name) {
  write_file(folder / name, bytes);
  return folder / name;
}

void state_dict(const std::string& bytes, const path& folder) {
  train::load_state_dict(file_of(bytes, folder, "model.pt"));
}

void safetensors(const std::string& bytes, const path& folder) {
  train::load_safetensors(file_of(bytes, folder, "model.safetensors"));
}

void checkpoint(const std::string& bytes, const path& folder) {
  train::read_checkpoint_info(file_of(bytes, folder, "checkpoint.pt"));
}

void config(const std::string& bytes, const path& folder) {
  train::Options options("fuzz", "");
  double lr = 0;
  options.section("training");
  options.add("lr", &lr, "").at_least(0);
  std::vector<std::int64_t> strides;
  options.section("model");
  options.add("strides", &strides, "");
  const std::string file = file_of(bytes, folder, "config.yaml");
  const char* const arguments[] = {"fuzz", "--config", file.c_str()};
  options.parse(3, arguments);
}

void har_ts(const std::string& bytes, const path& folder) {
  file_of(bytes, folder, "P_TRAIN.ts");
  file_of(bytes, folder, "P_TEST.ts");
  har::read_ts(folder, "P");
}

// A training file of signals, its labels and the class names, separated by zero bytes.
void har_ucihar(const std::string& bytes, const path& folder) {
  std::array<std::string, 3> parts;
  std::size_t begin = 0;
  for (std::string& part : parts) {
    const std::size_t end = std::min(bytes.find('\0', begin), bytes.size());
    part = bytes.substr(begin, end - begin);
    begin = std::min(end + 1, bytes.size());
  }
  for (const std::string split : {"train", "test"}) {
    for (const char* signal : {"body_acc", "body_gyro", "total_acc"}) {
      for (const char axis : {'x', 'y', 'z'})
        write_file(folder / split / "Inertial Signals" / (std::string(signal) + "_" + axis + "_" + split + ".txt"),
                   parts[0]);
    }
    write_file(folder / split / ("y_" + split + ".txt"), parts[1]);
  }
  write_file(folder / "activity_labels.txt", parts[2]);
  har::read_ucihar(folder);
}

void trials(const std::string& bytes, const path& folder) {
  write_file(video::trials_file(folder), bytes);
  video::DataFaults faults(video::trials_file(folder), video::OnBadData::kSkip);
  video::read_trials(folder, {}, 17, faults);
}

void manifest(const std::string& bytes, const path& folder) {
  asr::read_corpus(file_of(bytes, folder, "manifest.jsonl"));
}

void prices(const std::string& bytes, const path& folder) {
  clstm_ppo::read_prices(file_of(bytes, folder, "prices.csv"));
}

void timeline(const std::string& bytes, const path& folder) {
  cli::read_profile(file_of(bytes, folder, "trace.json").string());
}

constexpr FuzzTarget kTargets[] = {
    {"state_dict", state_dict}, {"safetensors", safetensors}, {"checkpoint", checkpoint}, {"config", config},
    {"har_ts", har_ts},         {"har_ucihar", har_ucihar},   {"trials", trials},         {"manifest", manifest},
    {"timeline", timeline},     {"prices", prices},
};

}  // namespace

std::span<const FuzzTarget> fuzz_targets() { return kTargets; }

void run_fuzz_target(const FuzzTarget& target, const std::string& bytes, const path& folder) {
  try {
    target.parse(bytes, folder);
  } catch (const InvalidArgument&) {
  }
}

}  // namespace ddpkit::testing
