// Tests of the programs on several GPUs.
#include <torch/torch.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "examples/har_program.h"
#include "gpu/gpu.h"
#include "gpu/programs.h"

namespace {

using ddpkit::testing::Arguments, ddpkit::testing::Folder, ddpkit::testing::joined, ddpkit::testing::run_ddpkit;
using gpu::check_close, gpu::check_quiet, gpu::run_ranks;

/// No batch norm and no dropout: the weights do not depend on how a batch is divided.
Arguments plain_har(const Folder& folder, int batch_size) {
  return {"--data",
          har::testing::generated(),
          "--mode",
          "flatten",
          "--dropout",
          "0",
          "--epochs",
          "2",
          "--no-amp",
          "--save-dir",
          folder.path(),
          "--batch-size",
          std::to_string(batch_size)};
}

std::vector<at::Tensor> har_weights(const Folder& folder) {
  return har::testing::weights_of(folder, {.mode = har::Mode::kFlatten, .channels = 9, .steps = 64, .classes = 6});
}

std::vector<at::Tensor> cpu_weights() {
  const Folder folder;
  const gpu::Variable hidden("CUDA_VISIBLE_DEVICES", "");
  const auto run = har::testing::run_har(0, plain_har(folder, 24));
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  return har_weights(folder);
}

}  // namespace

TEST_CASE("har --multi-gpu ddp on 3 GPUs gives the weights of the CPU", "[gpu]") {
  NEEDS_GPUS(3);
  const Folder folder, work;
  run_ranks(work, 3, DDPKIT_TEST_HAR, joined(plain_har(folder, 8), {"--multi-gpu", "ddp"}));
  check_close(har_weights(folder), cpu_weights());
}

TEST_CASE("har --multi-gpu dp on 2 GPUs gives the weights of the CPU", "[gpu]") {
  NEEDS_GPUS(2);
  const Folder folder;
  const auto run = har::testing::run_har(0, joined(plain_har(folder, 12), {"--multi-gpu", "dp", "--gpu-ids", "0,1"}));
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  check_quiet(run.errors);
  check_close(har_weights(folder), cpu_weights());
}

TEST_CASE("a rank that comes late to a collective changes no weight", "[gpu]") {
  NEEDS_GPUS(3);
  NEEDS_VIRTUAL_GPUS();
  const Folder folder, work;
  {
    const gpu::Variable fault("VGPU_FAULT", "rank=1 call=AllReduce n=5 do=delay:300");
    run_ranks(work, 3, DDPKIT_TEST_HAR, joined(plain_har(folder, 8), {"--multi-gpu", "ddp"}));
  }
  check_close(har_weights(folder), cpu_weights());
}

TEST_CASE("har on 4 GPUs, as ranks and as replicas, gives the weights of the CPU", "[gpu]") {
  NEEDS_GPUS(4);
  const Folder ranks, replicas, work;
  run_ranks(work, 4, DDPKIT_TEST_HAR, joined(plain_har(ranks, 6), {"--multi-gpu", "ddp"}));
  const auto run =
      har::testing::run_har(0, joined(plain_har(replicas, 6), {"--multi-gpu", "dp", "--gpu-ids", "0,1,2,3"}));
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  check_quiet(run.errors);
  const auto expected = cpu_weights();
  check_close(har_weights(ranks), expected);
  check_close(har_weights(replicas), expected);
}

TEST_CASE("har learns with its defaults on 2 GPUs", "[gpu]") {
  NEEDS_GPUS(2);
  const Folder work;
  const auto run =
      run_ranks(work, 2, DDPKIT_TEST_HAR, {"--data", har::testing::generated(), "--epochs", "8", "--json"});
  REQUIRE_FALSE(run.lines.empty());
  CHECK(nlohmann::json::parse(run.lines.front())["devices"] == 2);
}

TEST_CASE("har on 2 GPUs without bfloat16 trains in float16, and resumes with the same bits", "[gpu]") {
  NEEDS_GPUS(2);
  NEEDS_VIRTUAL_GPUS();
  const gpu::Variable capability("VGPU_COMPUTE_CAPABILITY", "75");
  const auto in_half = [](const Folder& folder, const Arguments& more) {
    Arguments arguments = plain_har(folder, 12);
    std::erase(arguments, "--no-amp");
    const Folder work;
    const auto run = run_ranks(work, 2, DDPKIT_TEST_HAR, joined(arguments, more));
    CHECK(std::ranges::any_of(run.lines,
                              [](const auto& line) { return line.find(", mixed precision float16, ") != line.npos; }));
    return run;
  };
  const Folder whole, parts;
  in_half(whole, {});
  const auto weights = har_weights(whole), expected = cpu_weights();
  for (std::size_t i = 0; i < weights.size(); ++i) {
    INFO("tensor " << i << " differs by " << (weights[i].cpu() - expected[i]).abs().max());
    CHECK(at::allclose(weights[i].cpu(), expected[i], 1e-2, 5e-3));  // Each of 10 updates moves a weight by up to 1e-3.
  }
  in_half(parts, {"--max-steps", "7"});
  in_half(parts, {});
  CHECK(ddpkit::testing::same_bits(har_weights(parts), weights));
}

TEST_CASE("har stopped and resumed on 2 GPUs ends with the weights of a whole run", "[gpu]") {
  NEEDS_GPUS(2);
  const Folder whole, parts, work;
  run_ranks(work, 2, DDPKIT_TEST_HAR, plain_har(whole, 12));
  run_ranks(work, 2, DDPKIT_TEST_HAR, joined(plain_har(parts, 12), {"--max-steps", "7"}));
  // Stopped in the second epoch: the checkpoint is from the end of the first.
  CHECK(ddpkit::train::read_checkpoint_info(parts / "checkpoint.pt").epoch == 1);
  run_ranks(work, 2, DDPKIT_TEST_HAR, plain_har(parts, 12));
  check_close(har_weights(parts), har_weights(whole));
}

// The reference: a checkpoint of 3 ranks from the beginning of the lost update, resumed on 2 ranks.
TEST_CASE("har --elastic on 3 virtual GPUs continues without a lost rank with the bits of a resumed run", "[gpu]") {
  NEEDS_GPUS(3);
  NEEDS_VIRTUAL_GPUS();
  const Folder continued, resumed, work;
  const auto run = run_ddpkit(
      work, joined({"run", "-n", "3", "--min-ranks", "2", DDPKIT_TEST_HAR, "--elastic"}, plain_har(continued, 8)),
      {{"VGPU_FAULT", "rank=2 call=AllReduce n=12 do=die"}});
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  check_quiet(run.errors);
  const std::string words = "; 2 ranks continue from step ";
  const auto at = run.errors.find(words);
  REQUIRE(at != std::string::npos);
  const std::string step = std::to_string(std::stoi(run.errors.substr(at + words.size())));
  run_ranks(work, 3, DDPKIT_TEST_HAR, joined(plain_har(resumed, 8), {"--save-steps", "1", "--max-steps", step}));
  REQUIRE(std::to_string(ddpkit::train::read_checkpoint_info(resumed / "checkpoint.pt").step) == step);
  run_ranks(work, 2, DDPKIT_TEST_HAR, plain_har(resumed, 8));
  CHECK(ddpkit::testing::same_bits(har_weights(continued), har_weights(resumed)));
}

TEST_CASE("ddpkit estimate predicts from a timeline of har on 2 GPUs", "[gpu]") {
  NEEDS_GPUS(2);
  const Folder work;
  const std::string timeline = work / "timeline.json";
  const gpu::Variable written("DDPKIT_TIMELINE", timeline), steps("DDPKIT_TIMELINE_STEPS", "12");
  run_ranks(work, 2, DDPKIT_TEST_HAR, plain_har(work, 4));
  const auto run =
      run_ddpkit(work, {"estimate", "--profile", timeline, "--cluster", "h100", "--devices", "1,2,8", "--json"});
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  const auto estimate = nlohmann::json::parse(run.lines.at(0));
  INFO(estimate.dump(2));
  CHECK(estimate.dump().find("null") == std::string::npos);
}

TEST_CASE("ddpkit doctor finds every GPU", "[gpu]") {
  NEEDS_GPUS(1);
  const Folder work;
  const auto run = run_ddpkit(work, {"doctor", "--json"});
  INFO(run.errors);
  REQUIRE(run.lines.size() == 1);
  const auto findings = nlohmann::json::parse(run.lines[0])["findings"];
  const auto has = [&](const std::string& words) {
    return std::ranges::any_of(
        findings, [&](const auto& each) { return each["what"].template get<std::string>().starts_with(words); });
  };
  INFO(findings.dump(2));
  const int gpus = gpu_count();
  for (int gpu = 0; gpu < gpus; ++gpu) CHECK(has("GPU " + std::to_string(gpu) + ": "));
  CHECK(has("NCCL 2."));
  for (const auto& each : findings) {
    if (each.contains("advice")) CHECK_THAT(each["advice"].get<std::string>(), !ContainsSubstring("CPU ranks"));
  }
  CHECK(has(std::to_string(gpus) + " ranks, nccl: ") == (gpus > 1));
}
