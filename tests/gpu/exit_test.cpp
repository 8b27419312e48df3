// The end of programs on several GPUs.
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <thread>

#include <ddpkit/ddpkit.h>

#include "gpu/gpu.h"
#include "gpu/programs.h"

namespace {

using ddpkit::testing::Folder;

ddpkit::testing::Run run_worker(const std::string& name) {
  const Folder work;
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  return ddpkit::testing::run_ddpkit(work, {"run", "-n", "3", self, "--in-process", name});
}

/// All ranks call a collective, rank 1 last. The other ranks do not wait for it.
void start_last_collective(const ddpkit::ProcessGroup& group) {
  static auto tensor = torch::ones({100000}).to(group.device());
  group.barrier();
  static_cast<void>(tensor.cpu());
  if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  group.all_reduce(tensor);
  if (group.rank() != 1) return;
  std::printf("the sum is %.0f\n", tensor[99999].item<double>());
  std::fflush(stdout);
}

void check_end(const ddpkit::testing::Run& run) {
  INFO(run.errors);
  CHECK(run.exit_code == 0);
  CHECK_THAT(run.errors, ContainsSubstring("[rank 1] the sum is 3"));
  gpu::check_quiet(run.errors);
}

std::optional<ddpkit::ProcessGroup> static_group;

}  // namespace

// The ranks of the next test cases.
TEST_CASE("a group in a static object", "[.worker]") {
  static_group.emplace(ddpkit::init_process_group({.backend = "nccl"}));
  start_last_collective(*static_group);
}

TEST_CASE("a rank that calls exit after a collective", "[.worker]") {
  const auto group = ddpkit::init_process_group({.backend = "nccl"});
  start_last_collective(group);
  std::exit(0);
}

TEST_CASE("one rank calls exit while the others continue", "[.worker]") {
  const auto group = ddpkit::init_process_group({.backend = "nccl"});
  auto tensor = torch::ones({1000}).to(group.device());
  for (int step = 0;; ++step) {
    if (step == 3 && group.rank() == 1) std::exit(0);
    group.all_reduce(tensor);
    static_cast<void>(tensor.cpu());
  }
}

TEST_CASE("a static group on 3 GPUs ends without killing the last collective", "[gpu]") {
  NEEDS_GPUS(3);
  check_end(run_worker("a group in a static object"));
}

TEST_CASE("exit(0) on 3 GPUs does not kill the last collective", "[gpu]") {
  NEEDS_GPUS(3);
  check_end(run_worker("a rank that calls exit after a collective"));
}

TEST_CASE("a rank on 3 GPUs calls exit(0) in the middle: the others end and the launcher names it", "[gpu]") {
  NEEDS_GPUS(3);
  const auto run = run_worker("one rank calls exit while the others continue");
  INFO(run.errors);
  CHECK(run.exit_code != 0);
  CHECK_THAT(run.errors, ContainsSubstring("rank 1 (") && ContainsSubstring("exited with code 0"));
}
