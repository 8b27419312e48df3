#include "step_rank.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <optional>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/graphed_step.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/parallel/fully_sharded_data_parallel.h>

#include "device.h"
#include "rank.h"
#include "step_clock.h"
#include "step_models.h"
#include "step_row.h"
#include "timing.h"
#include "workers.h"

namespace ddpkit::bench {
namespace {

using Clock = std::chrono::steady_clock;

/// Returns the bytes after `name` in a file of /proc/self; 0 if `name` is not in the file.
std::uint64_t proc_bytes(const char* file, const std::string& name) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    unsigned long long kilobytes = 0;
    if (line.starts_with(name) && std::sscanf(line.c_str() + name.size(), ": %llu kB", &kilobytes) == 1)
      return kilobytes * 1024;
  }
  return 0;
}

/// Returns the memory of tensors on a GPU that has been used.
c10::CachingAllocator::Stat allocated_on(c10::Device gpu) {
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return c10::getDeviceAllocator(gpu.type())->getDeviceStats(gpu.index()).allocated_bytes[kAll];
}

/// Returns the proportional set size of this process: private memory plus its share of shared memory.
std::uint64_t proportional_bytes() { return proc_bytes("/proc/self/smaps_rollup", "Pss"); }

DistributedDataParallelOptions ddp_options(const BucketCaps& caps) {
  DistributedDataParallelOptions options;
  if (caps.bucket_cap_mb) options.bucket_cap_mb = *caps.bucket_cap_mb;
  if (caps.first_bucket_cap_mb) options.first_bucket_cap_mb = *caps.first_bucket_cap_mb;
  return options;
}

/// One training loop. With `exchanges`, DistributedDataParallel or FullyShardedDataParallel wraps the model. Without,
/// each step has a barrier if there is a group.
class Training {
 public:
  Training(const StepPlan& plan, const std::optional<ProcessGroup>& group, bool exchanges, int rank, c10::Device device)
      : device_(device),
        bytes_before_(proportional_bytes()),
        task_(make_step_task(plan.models.at(0), plan.batch, rank, device, plan.activation_checkpoint)),
        group_(group) {
    const std::string update = updates_of(plan).at(0);
    if (exchanges && update == kFsdpUpdate) {
      fsdp_ = std::make_shared<FullyShardedDataParallel<StepModel>>(task_.model, *group_);
      wrapper_ = fsdp_;
    } else if (exchanges) {
      ddp_ = std::make_shared<DistributedDataParallel<StepModel>>(task_.model, *group_,
                                                                  ddp_options(bucket_caps(plan.bucket_caps_mb.at(0))));
      wrapper_ = ddp_;
    }
    if (update == kShardedUpdate || update == kInBackwardUpdate || update == kFsdpUpdate) {
      optimizer_ = make_sharded_step_optimizer(plan.optimizer, update, *wrapper_);
    } else {
      optimizer_ = make_step_optimizer(plan.optimizer, update, task_.model->parameters());
    }
    if (update != kGraphedUpdate) return;
    graphed_.emplace(
        device, std::vector<optim::FusedOptimizer*>{optimizer_.capturable},
        [this](const std::vector<at::Tensor>& batch) { return std::vector<at::Tensor>{step(batch[0], batch[1])}; });
    while (!graphed_->captured()) train();
  }

  StepTurn turn(int warmup, int steps) {
    for (int step = 0; step < warmup; ++step) train();
    StepTurn turn;
    StepClock clock(device_, steps);
    turn.start_us = clock.start_us();
    for (int step = 0; step < steps; ++step) {
      train();
      clock.lap();
      if (wrapper_ && device_.is_cpu()) turn.exposed_us.push_back(exposed_us());
    }
    turn.us = clock.us();
    return turn;
  }

  StepEnd end() const {
    StepEnd end;
    if (device_.is_cpu()) {
      const std::uint64_t bytes = proportional_bytes();
      end.peak_bytes = proc_bytes("/proc/self/status", "VmHWM");  // getrusage includes memory from before exec.
      end.memory_bytes = bytes > bytes_before_ ? bytes - bytes_before_ : 0;
    } else {
      const auto allocated = allocated_on(device_);
      end.peak_bytes = static_cast<std::uint64_t>(allocated.peak);
      end.memory_bytes = static_cast<std::uint64_t>(allocated.current);
    }
    const std::vector<at::Tensor> weights = task_.model->parameters();
    for (const at::Tensor& weight : weights) end.params += static_cast<std::uint64_t>(weight.numel());
    if (!wrapper_) return end;
    const auto stats = wrapper_->stats();
    end.buckets = stats.buckets.size();
    for (const BucketStats& bucket : stats.buckets) end.reduced_bytes += bucket.bytes;
    std::optional<FullyShardedDataParallelBase::Gathering> whole;
    if (fsdp_) whole.emplace(fsdp_->whole());
    end.wrong = count_wrong_weights(weights, *group_);
    return end;
  }

 private:
  void train() {
    if (graphed_) {
      (*graphed_)({task_.input, task_.target});
    } else {
      step(task_.input, task_.target);
    }
  }

  at::Tensor step(const at::Tensor& input, const at::Tensor& target) {
    optimizer_.zero_grad();
    const at::Tensor logits = fsdp_ ? (*fsdp_)(input) : ddp_ ? (*ddp_)(input) : task_.model->forward(input);
    const at::Tensor loss = torch::cross_entropy_loss(logits, target);
    loss.backward();
    if (group_ && !wrapper_) group_->barrier();
    optimizer_.step();
    return loss.detach();
  }

  double exposed_us() const {
    const auto stats = wrapper_->stats();
    double finished = stats.last_gradient_us;
    for (const BucketStats& bucket : stats.buckets) finished = std::max(finished, bucket.done_us);
    return finished - stats.last_gradient_us;
  }

  c10::Device device_;
  std::uint64_t bytes_before_;
  StepTask task_;
  std::optional<ProcessGroup> group_;
  std::shared_ptr<DistributedDataParallel<StepModel>> ddp_;
  std::shared_ptr<FullyShardedDataParallel<StepModel>> fsdp_;
  std::shared_ptr<DistributedDataParallelBase> wrapper_;  // One of the two; null without an exchange.
  StepOptimizer optimizer_;
  std::optional<optim::GraphedStep> graphed_;
};

/// Answers "turn WARMUP STEPS".
StepTurn answer_turn(Training& training, const std::string& question) {
  int warmup = 0, steps = 0;
  if (std::sscanf(question.c_str(), "turn %d %d", &warmup, &steps) != 2 || warmup < 0 || steps < 1)
    throw InvalidArgument(fmt::format("\"{}\" is no question to a rank of ddpkit bench step", question));
  return training.turn(warmup, steps);
}

}  // namespace

int run_step_rank(const std::string& backend, const StepPlan& plan, const std::string& control) {
  at::set_num_threads(1);
  const LaunchEnvironment environment = read_launch_environment();
  const c10::Device device = place_rank(plan.device, environment, !plan.no_pin);
  const c10::OptionalDeviceGuard on_device(device);
  std::optional<ProcessGroup> group;
  if (backend != kAlone) {
    try {
      group = init_process_group(
          {.backend = backend == kBarrier ? "shm" : backend, .device = device, .timeout = std::chrono::minutes(2)});
    } catch (const InvalidArgument& error) {
      std::cout << kReason << error.what() << std::endl;
      return kNoBackend;
    }
  }
  Training training(plan, group, backend != kAlone && backend != kBarrier, environment.rank, device);
  Questions questions(control, environment.local_rank);
  std::cout << kStepReport << "ready" << std::endl;
  for (std::string question; questions.next(question);) {
    if (question == "end") {
      std::cout << to_report(training.end()) << std::endl;
    } else {
      std::cout << to_report(answer_turn(training, question)) << std::endl;
    }
  }
  return 0;
}

std::uint64_t count_wrong_weights(const std::vector<at::Tensor>& weights, const ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  std::uint64_t wrong = 0;
  for (const at::Tensor& weight : weights) {
    const at::Tensor own = weight.detach().contiguous();
    at::Tensor reference = own.clone();
    group.broadcast(reference);
    // Compares bits: -0 is not 0.
    const at::Tensor is_wrong =
        own.view(at::kInt).ne(reference.view(at::kInt)).logical_or(own.isfinite().logical_not());
    wrong += static_cast<std::uint64_t>(is_wrong.sum().item<std::int64_t>());
  }
  return wrong;
}

}  // namespace ddpkit::bench
