#include "step_rank.h"

#include <torch/torch.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <optional>

#include <fmt/format.h>

#include <ddpkit/comm/error.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "rank.h"
#include "step_models.h"
#include "step_row.h"
#include "timing.h"
#include "workers.h"

namespace ddpkit::bench {
namespace {

using Clock = std::chrono::steady_clock;

/// Largest resident memory of this process so far. Not getrusage's, which counts what was there before exec.
std::uint64_t peak_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    unsigned long long kilobytes = 0;
    if (std::sscanf(line.c_str(), "VmHWM: %llu kB", &kilobytes) == 1) return kilobytes * 1024;
  }
  return 0;
}

/// Memory of this process, of what it shares with others its part.
std::uint64_t proportional_bytes() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string line; std::getline(rollup, line);) {
    unsigned long long kilobytes = 0;
    if (std::sscanf(line.c_str(), "Pss: %llu kB", &kilobytes) == 1) return kilobytes * 1024;
  }
  return 0;
}

DistributedDataParallelOptions ddp_options(const BucketCaps& caps) {
  DistributedDataParallelOptions options;
  if (caps.bucket_cap_mb) options.bucket_cap_mb = *caps.bucket_cap_mb;
  if (caps.first_bucket_cap_mb) options.first_bucket_cap_mb = *caps.first_bucket_cap_mb;
  return options;
}

/// One training loop: with a DistributedDataParallel around the model (`exchanges`), or without; a group that exchanges
/// nothing has a barrier in each step.
class Training {
 public:
  Training(const StepPlan& plan, const std::optional<ProcessGroup>& group, bool exchanges, int rank)
      : bytes_before_(proportional_bytes()), task_(make_step_task(plan.models.at(0), plan.batch, rank)), group_(group) {
    if (exchanges) ddp_.emplace(task_.model, *group_, ddp_options(bucket_caps(plan.bucket_caps_mb.at(0))));
    const std::string update = updates_of(plan).at(0);
    if (update == kShardedUpdate || update == kInBackwardUpdate) {
      optimizer_ = make_sharded_step_optimizer(plan.optimizer, update == kInBackwardUpdate, *ddp_);
    } else {
      optimizer_ = make_step_optimizer(plan.optimizer, update, task_.model->parameters());
    }
  }

  StepTurn turn(int warmup, int steps) {
    for (int step = 0; step < warmup; ++step) train();
    StepTurn turn;
    turn.us.reserve(static_cast<std::size_t>(steps));
    auto before = Clock::now();
    turn.start_us = microseconds(before.time_since_epoch());
    for (int step = 0; step < steps; ++step) {
      train();
      const auto after = Clock::now();
      turn.us.push_back(microseconds(after - before));
      if (ddp_) turn.exposed_us.push_back(exposed_us());
      before = after;
    }
    return turn;
  }

  StepEnd end() const {
    const std::uint64_t bytes = proportional_bytes();
    StepEnd end{.peak_bytes = peak_bytes(), .memory_bytes = bytes > bytes_before_ ? bytes - bytes_before_ : 0};
    const std::vector<at::Tensor> weights = task_.model->parameters();
    for (const at::Tensor& weight : weights) end.params += static_cast<std::uint64_t>(weight.numel());
    if (!ddp_) return end;
    if (const auto& trace = ddp_->reducer().last_backward()) {
      end.buckets = trace->buckets.size();
      for (const BucketTiming& bucket : trace->buckets) end.reduced_bytes += bucket.bytes;
    }
    end.wrong = count_wrong_weights(weights, *group_);
    return end;
  }

 private:
  void train() {
    optimizer_.zero_grad();
    const at::Tensor logits = ddp_ ? (*ddp_)(task_.input) : task_.model->forward(task_.input);
    torch::cross_entropy_loss(logits, task_.target).backward();
    if (group_ && !ddp_) group_->barrier();
    optimizer_.step();
  }

  double exposed_us() const {
    const auto& trace = ddp_->reducer().last_backward();
    Clock::time_point finished = trace->last_gradient;
    for (const BucketTiming& bucket : trace->buckets) finished = std::max(finished, bucket.finished);
    return microseconds(finished - trace->last_gradient);
  }

  std::uint64_t bytes_before_;
  StepTask task_;
  std::optional<ProcessGroup> group_;
  std::optional<DistributedDataParallel<StepModel>> ddp_;
  StepOptimizer optimizer_;
};

/// "turn WARMUP STEPS".
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
  if (!plan.no_pin) pin_to_core(environment.local_rank, environment.local_world_size);
  std::optional<ProcessGroup> group;
  if (backend != kAlone) {
    try {
      group = init_process_group(
          {.backend = backend == kBarrier ? "shm" : backend, .device = at::kCPU, .timeout = std::chrono::minutes(2)});
    } catch (const InvalidArgument& error) {
      std::cout << kReason << error.what() << std::endl;
      return kNoBackend;
    }
  }
  Training training(plan, group, backend != kAlone && backend != kBarrier, environment.rank);
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
    // As bits: -0 is not 0.
    const at::Tensor is_wrong =
        own.view(at::kInt).ne(reference.view(at::kInt)).logical_or(own.isfinite().logical_not());
    wrong += static_cast<std::uint64_t>(is_wrong.sum().item<std::int64_t>());
  }
  return wrong;
}

}  // namespace ddpkit::bench
