#include "har/devices.h"

#include <torch/cuda.h>

#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/parallel/data_parallel.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/train/main.h>

#include "har/libtorch_parallel.h"

namespace har {
namespace {

using ddpkit::train::UsageError;

class OneDevice : public Devices {
 public:
  explicit OneDevice(std::shared_ptr<Classifier> model) : model_(std::move(model)) {}

  at::Tensor backward(const Split& batch, const Loss& loss, bool) override {
    const at::Tensor value = loss([this](const at::Tensor& windows) { return model_->forward(windows); }, batch);
    value.backward();
    return value.detach();
  }

 private:
  std::shared_ptr<Classifier> model_;
};

class Distributed : public Devices {
 public:
  Distributed(std::shared_ptr<Classifier> model, const ddpkit::ProcessGroup& group) : ddp_(std::move(model), group) {}

  at::Tensor backward(const Split& batch, const Loss& loss, bool synchronise) override {
    if (synchronise) return backward(batch, loss);
    const auto no_sync = ddp_.no_sync();
    return backward(batch, loss);
  }
  ddpkit::DistributedDataParallelBase* wrapper() override { return &ddp_; }

 private:
  at::Tensor backward(const Split& batch, const Loss& loss) {
    const at::Tensor value = loss([this](const at::Tensor& windows) { return ddp_(windows); }, batch);
    value.backward();
    return value.detach();
  }

  ddpkit::DistributedDataParallel<Classifier> ddp_;
};

class Replicated : public Devices {
 public:
  Replicated(std::shared_ptr<Classifier> model, const std::vector<c10::Device>& devices)
      : dp_(std::move(model), {.devices = devices}) {}

  at::Tensor backward(const Split& batch, const Loss& loss, bool) override {
    return dp_.train_step(batch, [&](Classifier& replica, const Split& part) {
      return loss([&](const at::Tensor& windows) { return replica.forward(windows); }, part);
    });
  }

 private:
  ddpkit::DataParallel<Classifier> dp_;
};

std::vector<c10::Device> on_gpus(const std::vector<int>& ids) {
  std::vector<c10::Device> devices;
  for (const int id : ids) devices.emplace_back(c10::kCUDA, static_cast<c10::DeviceIndex>(id));
  return devices;
}

void check_gpu_ids(const std::vector<int>& ids, int there) {
  const std::string given = fmt::format("--gpu-ids {}", fmt::join(ids, ","));
  std::set<int> seen;
  for (const int id : ids) {
    if (id >= there)
      throw UsageError(fmt::format("{}: there is no GPU {}: this host shows {}", given, id,
                                   there == 0   ? "none"
                                   : there == 1 ? "one, number 0"
                                                : fmt::format("{}, numbers 0 to {}", there, there - 1)));
    if (!seen.insert(id).second) throw UsageError(fmt::format("{}: GPU {} occurs twice", given, id));
  }
}

}  // namespace

std::vector<c10::Device> choose_devices(const TrainOptions& options, const ddpkit::train::Options& declared) {
  const ddpkit::LaunchEnvironment environment = ddpkit::read_launch_environment();
  const int ranks = environment.local_world_size;
  if (environment.world_size > 1 && options.multi_gpu != MultiGpu::kDdp)
    throw UsageError(
        fmt::format("--multi-gpu {} is one process, but the launcher started {}: start har without a launcher, or "
                    "use --multi-gpu ddp",
                    declared.text("multi_gpu"), environment.world_size));
  const int gpus = static_cast<int>(torch::cuda::device_count());
  std::vector<int> ids = options.gpu_ids;
  check_gpu_ids(ids, gpus);
  if (options.replicas && options.multi_gpu != MultiGpu::kDp)
    throw UsageError("--replicas is of --multi-gpu dp: with ddp the launcher sets the number of ranks");
  if (ids.empty()) {
    for (int id = 0; id < gpus; ++id) ids.push_back(id);
  }
  const bool on_cpu = gpus == 0 || options.run.backend == "shm" || options.run.backend == "gloo";
  switch (options.multi_gpu) {
    case MultiGpu::kDp:
      if (options.replicas && !on_cpu) throw UsageError("--replicas is for the CPU; use --gpu-ids to choose GPUs");
      if (!on_cpu) return on_gpus(ids);
      return std::vector<c10::Device>(static_cast<std::size_t>(options.replicas.value_or(ddpkit::available_cores())),
                                      c10::kCPU);
    case MultiGpu::kLibTorchDp:
      if (on_cpu) throw UsageError("--multi-gpu libtorch-dp needs a GPU: LibTorch's data_parallel supports only GPUs");
      return on_gpus(ids);
    case MultiGpu::kDdp:
      if (on_cpu) return {c10::kCPU};
      if (static_cast<int>(ids.size()) < ranks)
        throw UsageError(fmt::format("{} ranks on this host, but only {} GPU{} for them: one rank a GPU", ranks,
                                     ids.size(), ids.size() == 1 ? "" : "s"));
      return on_gpus({ids[static_cast<std::size_t>(environment.local_rank)]});
    case MultiGpu::kNone:
      break;
  }
  return on_cpu ? std::vector<c10::Device>{c10::kCPU} : on_gpus({ids.front()});
}

std::unique_ptr<Devices> make_devices(const TrainOptions& options, const std::vector<c10::Device>& devices,
                                      std::shared_ptr<Classifier> model, const ddpkit::ProcessGroup& group) {
  switch (options.multi_gpu) {
    case MultiGpu::kDp:
      return std::make_unique<Replicated>(std::move(model), devices);
    case MultiGpu::kLibTorchDp:
      return make_libtorch_parallel(std::move(model), devices);
    case MultiGpu::kDdp:
      return std::make_unique<Distributed>(std::move(model), group);
    case MultiGpu::kNone:
      break;
  }
  return std::make_unique<OneDevice>(std::move(model));
}

}  // namespace har
