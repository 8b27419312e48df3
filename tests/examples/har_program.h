// Runs the program `har` and reads its results.
#pragma once

#include <torch/torch.h>

#include <algorithm>

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/train/checkpoint.h>

#include "har/generate.h"
#include "har/model.h"
#include "support/program.h"

namespace har::testing {

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

struct Run : ddpkit::testing::ProgramRun {
  const std::string& last_line() const { return lines.back(); }
  double accuracy() const {
    const std::string start = "test accuracy ";
    REQUIRE_FALSE(lines.empty());
    REQUIRE(last_line().starts_with(start));
    REQUIRE(last_line().ends_with(" %"));
    return std::stod(last_line().substr(start.size()));
  }
};

/// Adds a batch size for the small data sets of the tests, unless `arguments` name one or a config.
inline Arguments with_batch_size(Arguments arguments) {
  const auto names_one = [](const std::string& argument) {
    return argument.starts_with("--batch-size") || argument == "--config";
  };
  if (std::none_of(arguments.begin(), arguments.end(), names_one))
    arguments = joined(arguments, {"--batch-size", "16"});
  return arguments;
}

inline Run run_har(int ranks, const Arguments& arguments, std::optional<Kill> kill = std::nullopt) {
  return {ddpkit::testing::run_program(DDPKIT_TEST_HAR, ranks, with_batch_size(arguments), kill)};
}

/// The data set of all tests of this process: 120 training and 61 test windows of 64 steps.
inline const std::string& generated() {
  static const Folder folder;
  static const std::string path = [] {
    generate_ucihar(folder / "set", {.train = 120, .test = 61, .steps = 64});
    return (folder / "set").string();
  }();
  return path;
}

/// Reads the weights and statistics from the checkpoint of a run on that set.
inline std::vector<at::Tensor> weights_of(const Folder& save_dir,
                                          const ModelOptions& options = {.channels = 9, .steps = 64, .classes = 6}) {
  const auto model = make_model(options);
  ddpkit::optim::FusedAdamW optimizer(model->parameters());
  ddpkit::train::read_checkpoint(save_dir / "checkpoint.pt", *model, optimizer);
  std::vector<at::Tensor> tensors = model->parameters();
  for (const at::Tensor& buffer : model->buffers()) tensors.push_back(buffer);
  return tensors;
}

/// Checks that the program exits with `code` and prints one sentence, once.
inline void check_refused(const Arguments& arguments, int code, const std::string& message,
                          const std::vector<int>& worlds = {1}) {
  ddpkit::testing::check_program_refuses(DDPKIT_TEST_HAR, with_batch_size(arguments), code, message, worlds);
}

}  // namespace har::testing
