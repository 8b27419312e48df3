// Runs of the program `asr`, on recordings that these tests make.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include <fmt/format.h>

#include <ddpkit/comm/local_launch.h>

#include "asr/score.h"
#include "asr/trained_model.h"
#include "support/catch.h"
#include "support/folder.h"
#include "support/sound.h"

namespace asr::testing {

using ddpkit::testing::Folder;
using ddpkit::testing::read_file;
using ddpkit::testing::spoken;
using ddpkit::testing::write_file;
using ddpkit::testing::write_sound;
using Arguments = std::vector<std::string>;

struct Run {
  int exit_code = -1;
  std::vector<std::string> lines;  ///< Of rank 0's stdout.
  std::string errors;              ///< Everyone's stderr, and the other ranks' stdout.
};

/// Under a launcher on so many ranks; without one for 0 ranks.
inline Run run_asr(int ranks, const Arguments& arguments) {
  const Folder folder;
  const std::string alone =
      ranks == 0 ? "unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT; " : "";
  const std::string errors = (folder / "errors").string();
  Arguments command = {"sh", "-c", "NAME=${RANK:-0}; " + alone + R"(exec "$@" 2> ")" + errors + R"(-$NAME")", "sh",
                       DDPKIT_TEST_ASR};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::string output;
  Run run;
  const ddpkit::LocalLaunchResult result = ddpkit::local_launch(
      {.command = command,
       .ranks = std::max(1, ranks),
       .environment = {{"OMP_NUM_THREADS", "1"}},
       .time_limit = std::chrono::seconds(200),
       .on_output = [&](int rank, const std::string& text) { (rank == 0 ? output : run.errors) += text; }});
  REQUIRE_FALSE(result.timed_out);
  run.exit_code = result.exit_code();
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) run.lines.push_back(line);
  for (int rank = 0; rank < std::max(1, ranks); ++rank) run.errors += read_file(errors + "-" + std::to_string(rank));
  return run;
}

inline Arguments joined(Arguments a, const Arguments& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// A corpus for all tests of this process: a manifest of 46 "spoken" texts of letters a to e.
inline const std::string& corpus() {
  static const Folder folder;
  static const std::string path = [] {
    std::string lines;
    for (int i = 0; i < 46; ++i) {
      std::string text;
      for (int j = 0, rest = 17 * i + 5; j < 2 + i % 7; ++j, rest = rest * 5 + 3)
        text += static_cast<char>('a' + rest % 5);
      if (text.size() > 4) text[2] = ' ';
      const std::string name = fmt::format("{}.wav", i);
      write_sound(folder / name, spoken(text));
      lines += nlohmann::json{{"audio_filepath", name}, {"text", text}}.dump() + "\n";
    }
    write_file(folder / "all.jsonl", lines);
    return (folder / "all.jsonl").string();
  }();
  return path;
}

/// A model that is small enough for tests.
inline Arguments small(const std::string& data = corpus()) {
  return {"data.train=" + data,
          "features.sample_rate=8000",
          "features.mels=24",
          "model.width=32",
          "model.strides=[2, 1]",
          "model.layers=2",
          "model.memory_channels=4",
          "model.order=6",
          "model.theta=12",
          "training.batch_size=8",
          "training.lr=8e-3",
          "training.lr_scaling=none",
          "training.spec_augment.time_width=4",
          "training.spec_augment.frequency_width=2"};
}

inline std::vector<at::Tensor> weights_of(const std::filesystem::path& save_dir) {
  const TrainedModel trained = load_model(save_dir);
  std::vector<at::Tensor> tensors = trained.model->parameters();
  for (const at::Tensor& buffer : trained.model->buffers()) tensors.push_back(buffer);
  return tensors;
}

inline bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) { return x.equal(y); });
}

}  // namespace asr::testing
