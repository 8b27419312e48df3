// Runs the program `asr` on synthetic recordings.
#pragma once

#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <ddpkit/train/checkpoint.h>

#include "asr/score.h"
#include "asr/trained_model.h"
#include "support/program.h"
#include "support/sound.h"

namespace asr::testing {

using ddpkit::testing::Arguments;
using ddpkit::testing::Folder;
using ddpkit::testing::is_within_epoch;
using ddpkit::testing::joined;
using ddpkit::testing::Kill;
using ddpkit::testing::read_file;
using ddpkit::testing::run_until_not_killed;
using ddpkit::testing::same_bits;
using ddpkit::testing::spoken;
using ddpkit::testing::write_file;
using ddpkit::testing::write_sound;

using Run = ddpkit::testing::ProgramRun;

/// Runs under a launcher with `ranks` ranks; without a launcher for 0 ranks.
inline Run run_asr(int ranks, const Arguments& arguments, std::optional<Kill> kill = std::nullopt) {
  return ddpkit::testing::run_program(DDPKIT_TEST_ASR, ranks, arguments, kill);
}

/// The corpus of all tests of this process: a manifest of 46 synthetic texts of letters a to e.
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

/// Options of a model small enough for tests.
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

}  // namespace asr::testing
