// Trainers on several GPUs give the weights of as many CPU ranks.
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "examples/asr_program.h"
#include "examples/clstm_ppo_program.h"
#include "examples/video_program.h"
#include "gpu/gpu.h"
#include "gpu/programs.h"

namespace {

using ddpkit::testing::Arguments, ddpkit::testing::Folder, ddpkit::testing::joined;
using gpu::check_close, gpu::run_ranks;

/// Runs a trainer on GPUs and on CPU ranks, and compares the weights. `saved` becomes the last option.
void check_as_on_cpus(int ranks, const std::string& program, const Arguments& arguments, const std::string& saved,
                      const std::function<std::vector<at::Tensor>(const Folder&)>& weights) {
  const Folder work, on_gpus, on_cpus;
  const gpu::Variable float32("NVIDIA_TF32_OVERRIDE", "0");
  run_ranks(work, ranks, program, joined(arguments, {saved, on_gpus.path()}));
  const auto found = weights(on_gpus);
  const gpu::Variable hidden("CUDA_VISIBLE_DEVICES", "");
  run_ranks(work, ranks, program, joined(arguments, {saved, on_cpus.path()}));
  check_close(found, weights(on_cpus));
}

}  // namespace

TEST_CASE("asr on 2 GPUs gives the weights of 2 CPU ranks", "[gpu]") {
  NEEDS_GPUS(2);
  check_as_on_cpus(2, DDPKIT_TEST_ASR, joined(asr::testing::small(), {"training.epochs=1", "training.amp=false"}),
                   "--save-dir", [](const Folder& folder) { return asr::testing::weights_of(folder.path()); });
}

TEST_CASE("clstm_ppo on 2 GPUs gives the weights of 2 CPU ranks", "[gpu]") {
  NEEDS_GPUS(2);
  check_as_on_cpus(2, DDPKIT_TEST_CLSTM_PPO, joined(clstm_ppo::testing::quick(), {"--num-episodes", "32", "--no-amp"}),
                   "--save-dir", clstm_ppo::testing::weights_of);
}

TEST_CASE("train_multigpu.sh 3 on GPUs gives the weights of 3 CPU ranks", "[gpu]") {
  NEEDS_GPUS(3);
  const Arguments arguments = joined(video::testing::quick(), {"--epochs", "1", "--no-amp", "--save-dir"});
  const Folder work, on_gpus, on_cpus;
  const gpu::Variable video("VIDEO", DDPKIT_TEST_VIDEO), float32("NVIDIA_TF32_OVERRIDE", "0");
  const auto script = ddpkit::testing::run_program(DDPKIT_TEST_VIDEO_FOLDER "/train_multigpu.sh", 0,
                                                   joined(joined({"3"}, arguments), {on_gpus.path()}));
  INFO(script.errors);
  REQUIRE(script.exit_code == 0);
  gpu::check_quiet(script.errors);
  const auto found = video::testing::weights_in(on_gpus / "checkpoint.pt");
  const gpu::Variable hidden("CUDA_VISIBLE_DEVICES", "");
  run_ranks(work, 3, DDPKIT_TEST_VIDEO, joined(joined({"train"}, arguments), {on_cpus.path()}));
  check_close(found, video::testing::weights_in(on_cpus / "checkpoint.pt"));
}
