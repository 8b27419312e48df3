// Runs the program `video` and reads its results.
#pragma once

#include <torch/torch.h>

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/train/checkpoint.h>

#include "support/program.h"
#include "video/generate.h"
#include "video/model.h"

namespace video::testing {

using ddpkit::testing::Arguments;
using ddpkit::testing::Folder;
using ddpkit::testing::is_within_epoch;
using ddpkit::testing::joined;
using ddpkit::testing::Kill;
using ddpkit::testing::names_in;
using ddpkit::testing::read_file;
using ddpkit::testing::run_until_not_killed;
using ddpkit::testing::same_bits;
using ddpkit::testing::write_file;

using Run = ddpkit::testing::ProgramRun;

inline Run run_video(int ranks, const Arguments& arguments, std::optional<Kill> kill = std::nullopt) {
  return ddpkit::testing::run_program(DDPKIT_TEST_VIDEO, ranks, arguments, kill);
}

/// The data set of all tests of this process: 6 videos of 32x32 with 60 trials.
inline const std::filesystem::path& generated() {
  static const Folder folder;
  static const std::filesystem::path path = [] {
    generate(folder / "set", {.videos = 6, .trials = 60, .least_of_class = 2, .size = {32, 32}});
    return folder / "set";
  }();
  return path;
}

/// Options of a small model on that set, for tests that do not test learning.
inline Arguments quick(const std::filesystem::path& data = generated(), const std::string& check = "index") {
  return {"--data", data.string(), "--size", "32", "--width", "2", "--batch-size", "4", "--check", check, "--json"};
}

/// Reads the weights and statistics from a checkpoint of a run.
inline std::vector<at::Tensor> weights_in(const std::filesystem::path& checkpoint) {
  Classifier model({.classes = 8, .width = 2});
  ddpkit::optim::FusedAdamW optimizer(model.parameters());
  ddpkit::train::read_checkpoint(checkpoint, model, optimizer);
  std::vector<at::Tensor> tensors = model.parameters();
  for (const at::Tensor& buffer : model.buffers()) tensors.push_back(buffer);
  return tensors;
}

/// Checks that the program exits with `code` and prints one sentence, once.
inline void check_refused(const Arguments& arguments, int code, const std::string& message,
                          const std::vector<int>& worlds = {1}) {
  ddpkit::testing::check_program_refuses(DDPKIT_TEST_VIDEO, arguments, code, message, worlds);
}

}  // namespace video::testing
