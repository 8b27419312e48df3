// Runs of the program `video`, and what they leave behind.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include <fmt/format.h>

#include <ddpkit/comm/local_launch.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/train/checkpoint.h>

#include "support/catch.h"
#include "support/folder.h"
#include "video/generate.h"
#include "video/model.h"

namespace video::testing {

using ddpkit::testing::Folder;
using ddpkit::testing::names_in;
using ddpkit::testing::read_file;
using ddpkit::testing::write_file;
using Arguments = std::vector<std::string>;

struct Run {
  int exit_code = -1;
  std::vector<std::string> lines;  ///< Of rank 0's stdout.
  std::string errors;              ///< Everyone's stderr, and the other ranks' stdout.

  nlohmann::json json(std::size_t line) const { return nlohmann::json::parse(lines.at(line)); }
};

/// kill -9 of a rank some time after its start.
struct Kill {
  int rank = 0;
  double after_seconds = 1;
};

inline Run run_video(int ranks, const Arguments& arguments, std::optional<Kill> kill = std::nullopt) {
  const Folder folder;
  const std::string killed =
      kill ? fmt::format("[ $RANK = {} ] && set -- timeout -s KILL {} \"$@\"; ", kill->rank, kill->after_seconds) : "";
  Arguments command = {"sh", "-c", killed + R"(exec "$@" 2> ")" + (folder / "errors").string() + R"(-$RANK")", "sh",
                       DDPKIT_TEST_VIDEO};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::string output;
  Run run;
  const ddpkit::LocalLaunchResult result = ddpkit::local_launch(
      {.command = command,
       .ranks = ranks,
       .environment = {{"OMP_NUM_THREADS", "1"}},
       .time_limit = std::chrono::seconds(200),
       .on_output = [&](int rank, const std::string& text) { (rank == 0 ? output : run.errors) += text; }});
  REQUIRE_FALSE(result.timed_out);
  run.exit_code = result.exit_code();
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) run.lines.push_back(line);
  for (int rank = 0; rank < ranks; ++rank) run.errors += read_file(folder / ("errors-" + std::to_string(rank)));
  return run;
}

inline Arguments joined(Arguments a, const Arguments& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// One data set for all tests of this process: 6 videos of 32x32 with 60 trials.
inline const std::filesystem::path& generated() {
  static const Folder folder;
  static const std::filesystem::path path = [] {
    generate(folder / "set", {.videos = 6, .trials = 60, .least_of_class = 2, .size = {32, 32}});
    return folder / "set";
  }();
  return path;
}

/// A small model on that set: what a test of anything but learning needs.
inline Arguments quick(const std::filesystem::path& data = generated(), const std::string& check = "index") {
  return {"--data", data.string(), "--size", "32", "--width", "2", "--batch-size", "4", "--check", check, "--json"};
}

/// The weights and statistics in a checkpoint of such a run.
inline std::vector<at::Tensor> weights_in(const std::filesystem::path& checkpoint) {
  Classifier model({.classes = 8, .width = 2});
  ddpkit::optim::FusedAdamW optimizer(model.parameters());
  ddpkit::train::read_checkpoint(checkpoint, model, optimizer);
  std::vector<at::Tensor> tensors = model.parameters();
  for (const at::Tensor& buffer : model.buffers()) tensors.push_back(buffer);
  return tensors;
}

inline bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) { return x.equal(y); });
}

/// Fails with `code` and says one sentence, once.
inline void check_refused(const Arguments& arguments, int code, const std::string& message,
                          const std::vector<int>& worlds = {1, 2}) {
  for (const int ranks : worlds) {
    CAPTURE(arguments, ranks);
    const Run run = run_video(ranks, arguments);
    CHECK(run.exit_code == code);
    CHECK_THAT(run.errors, ContainsSubstring(message));
    CHECK(std::count(run.errors.begin(), run.errors.end(), '\n') == 1);
    CHECK(run.lines.empty());
  }
}

}  // namespace video::testing
