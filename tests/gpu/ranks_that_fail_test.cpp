// A rank on a GPU fails: the others end soon, and the launcher names the rank.
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <filesystem>

#include <ddpkit/ddpkit.h>

#include "cli/run_ddpkit.h"
#include "examples/har_program.h"
#include "gpu/gpu.h"
#include "gpu/models.h"
#include "gpu/programs.h"

namespace {

using ddpkit::testing::Folder;

double age_of(const std::filesystem::path& file) {
  const auto age = std::filesystem::file_time_type::clock::now() - std::filesystem::last_write_time(file);
  return std::chrono::duration<double>(age).count();
}

}  // namespace

TEST_CASE("a rank of har on 3 GPUs is killed: the others end and the launcher names it", "[gpu]") {
  NEEDS_GPUS(3);
  const Folder saved, work;
  const std::string checkpoint = saved / "checkpoint.pt";
  const std::string script = "if [ $RANK = 1 ]; then (until [ -e '" + checkpoint + "' ]; do sleep 0.02; done; touch '" +
                             (work / "killed").string() + "'; kill -9 $$) & fi; exec \"$@\"";
  const auto run = ddpkit::testing::run_ddpkit(
      work, {"run", "-n", "3", "sh", "-c", script, "sh", DDPKIT_TEST_HAR, "--data", har::testing::generated(),
             "--epochs", "1000", "--multi-gpu", "ddp", "--save-dir", saved.path()});
  INFO(run.errors);
  CHECK(run.exit_code != 0);
  WARN("the program ended " << age_of(work / "killed") << " s after the kill");
  CHECK_THAT(run.errors, ContainsSubstring("rank 1 (") && ContainsSubstring("signal 9"));
  gpu::check_quiet(run.errors);
}

TEST_CASE("a rank of har on 3 virtual GPUs dies inside a collective", "[gpu]") {
  NEEDS_GPUS(3);
  NEEDS_VIRTUAL_GPUS();
  const Folder work;
  const auto run = ddpkit::testing::run_ddpkit(
      work, {"run", "-n", "3", DDPKIT_TEST_HAR, "--data", har::testing::generated(), "--multi-gpu", "ddp"},
      {{"VGPU_FAULT", "rank=2 call=AllReduce n=12 do=die"}});
  INFO(run.errors);
  CHECK(run.exit_code != 0);
  CHECK_THAT(run.errors, ContainsSubstring("rank 2 (") && ContainsSubstring("signal 9"));
  gpu::check_quiet(run.errors);
}

// A rank of the next test case.
TEST_CASE("a rank that throws in backward", "[.worker]") {
  const auto group = ddpkit::init_process_group({.backend = "nccl"});
  auto net = gpu::net();
  net->to(group.device());
  ddpkit::DistributedDataParallel ddp(net, group, gpu::small_buckets());
  for (int step = 0; step < 100; ++step) {
    const auto output = ddp(torch::ones({4, 12}, torch::kDouble).to(group.device()));
    if (step == 3 && group.rank() == 1)
      output.register_hook([](const torch::Tensor&) { throw std::runtime_error("no such luck"); });
    gpu::loss_of(output).backward();
  }
  torch::cuda::synchronize();
}

TEST_CASE("a rank on 3 GPUs throws in backward: the others end and the launcher names it", "[gpu]") {
  NEEDS_GPUS(3);
  const Folder work;
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const auto run =
      ddpkit::testing::run_ddpkit(work, {"run", "-n", "3", self, "--in-process", "a rank that throws in backward"});
  INFO(run.errors);
  CHECK(run.exit_code != 0);
  CHECK_THAT(run.errors, ContainsSubstring("rank 1 ("));
  CHECK_THAT(run.errors + run.lines.front(), ContainsSubstring("exited with code 1"));
  gpu::check_quiet(run.errors);
}
