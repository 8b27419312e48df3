#include "clstm_ppo/device.h"

#include <ATen/Parallel.h>
#include <torch/cuda.h>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/precision.h>
#include <ddpkit/train/main.h>

namespace clstm_ppo {

using ddpkit::train::UsageError;

c10::Device choose_device(const TrainOptions& options, const ddpkit::LaunchEnvironment& environment) {
  return choose_device(options, environment, static_cast<int>(torch::cuda::device_count()));
}

c10::Device choose_device(const TrainOptions& options, const ddpkit::LaunchEnvironment& environment, int there) {
  const int num_gpus = options.run.launch.num_gpus.value_or(-1);
  if (num_gpus > there)
    throw UsageError(
        fmt::format("--num-gpus {}: this host shows {}", num_gpus, there == 0 ? "none" : fmt::format("{}", there)));
  const int gpus = num_gpus < 0 ? there : num_gpus;
  const std::string& backend = options.run.backend;
  const bool on_cpu = backend == "shm" || backend == "gloo" || backend == "hierarchical";
  if (num_gpus > 0 && on_cpu)
    throw UsageError(fmt::format("--num-gpus {}: --backend {} trains on the CPU; use nccl", num_gpus, backend));
  if (gpus == 0 || on_cpu) return c10::kCPU;
  // Without a launcher, this program starts the ranks.
  if (environment.launcher != "none" && environment.local_world_size < num_gpus)
    throw UsageError(
        fmt::format("--num-gpus {0}: only {1} rank{2} on this host, one per GPU; start {0} with "
                    "ddpkit run -n {0}",
                    num_gpus, environment.local_world_size, environment.local_world_size == 1 ? " runs" : "s run"));
  if (environment.local_world_size > gpus)
    throw UsageError(fmt::format("{} ranks on this host, but only {} GPU{} for them: one rank a GPU",
                                 environment.local_world_size, gpus, gpus == 1 ? "" : "s"));
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(environment.local_rank)};
}

void set_up_device(const TrainOptions& options, c10::Device device) {
  if (!device.is_cuda()) {
    at::set_num_threads(options.threads);
    return;
  }
  ddpkit::optim::set_precision({.cudnn_benchmark = options.cudnn_benchmark}, device);
  // Devices with bfloat16 have TensorFloat-32: both need compute capability 8.0.
  if (ddpkit::optim::fastest_type(device) == c10::kBFloat16)
    ddpkit::optim::set_precision({.matmul_tf32 = options.tf32, .cudnn_tf32 = options.tf32}, device);
}

void check_options(const TrainOptions& options) {
  if (options.episode_steps % options.sequence != 0)
    throw UsageError(
        fmt::format("--episode-steps {} is no multiple of --sequence {}", options.episode_steps, options.sequence));
  if (options.run.batch_size % options.sequence != 0)
    throw UsageError(fmt::format("--batch-size {} is no multiple of --sequence {}: a batch is of whole sequences",
                                 options.run.batch_size, options.sequence));
  if (!options.plot.empty() && !options.plot.ends_with(".svg"))
    throw UsageError(fmt::format("--plot draws SVG only: name a file that ends in .svg, not {}", options.plot));
}

}  // namespace clstm_ppo
