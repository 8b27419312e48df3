#include "recovery_rank.h"

#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/data/distributed_sampler.h>
#include <ddpkit/optim/elastic.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "step_models.h"
#include "step_plan.h"

namespace ddpkit::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kBatch = 32;
constexpr std::size_t kSamples = 50000;
constexpr int kStepsAfter = 50;  ///< After the recovery.

double us(Clock::duration time) { return std::chrono::duration<double, std::micro>(time).count(); }

class RecoveryTraining {
 public:
  RecoveryTraining(const ProcessGroup& group, const RecoveryRankOptions& options)
      : group_(group),
        first_rank_(group.rank()),
        task_(make_step_task(options.model, kBatch, group.rank())),
        ddp_(task_.model, group) {
    if (options.optimizer == "sgd") {
      optimizer_ = std::make_unique<optim::FusedSGD>(task_.model->parameters(), torch::optim::SGDOptions(0.01));
    } else {
      // With a larger rate, the squares of the gradients soon become denormal numbers, which take 5 times as long.
      optimizer_ = std::make_unique<optim::FusedAdamW>(task_.model->parameters(), torch::optim::AdamWOptions(1e-6));
    }
  }

  void train() {
    optimizer_->zero_grad();
    torch::cross_entropy_loss(ddp_(task_.input), task_.target).backward();
    optimizer_->step();
  }

  /// Call after each step. `changes`: how often the ranks have changed. Returns false after the last step, some steps
  /// after change `last`.
  bool note_step(std::uint64_t changes, std::uint64_t last) {
    const Clock::time_point now = Clock::now();
    if (last_) longest_ = std::max(longest_, now - *last_);
    last_ = now;
    if (++steps_ == kRecoveryWarmup && changes == 0) report(fmt::format("ready {} {}", first_rank_, ::getpid()));
    if (std::exchange(changes_, changes) != changes) {
      steps_after_ = 0;
      report(fmt::format("step {} {:.1f} {:.1f}", first_rank_, us(now.time_since_epoch()), us(longest_)));
      longest_ = {};
    }
    return changes < last || ++steps_after_ < kStepsAfter;
  }

  /// Trains until a rank is lost, then without it, and then with a new one.
  void run_elastic() {
    DistributedSampler sampler(kSamples, group_);
    optim::Elastic elastic(ddp_, sampler, {}, *optimizer_);
    for (std::uint64_t epoch = sampler.epoch();; ++epoch) {
      sampler.set_epoch(epoch);
      do {
        sampler.reset();
        while (const auto indices = sampler.next(kBatch)) {
          if (!elastic.step(static_cast<std::int64_t>(indices->size()), [this] { train(); })) break;
          if (!note_step(group_.generation(), 2)) return;
        }
      } while (elastic.interrupted());
    }
  }

  /// Saves a checkpoint before the rank is killed. Started again, trains from the checkpoint.
  void run_restarted(const std::string& checkpoint) {
    const bool is_restarted = std::filesystem::exists(checkpoint);
    if (is_restarted) torch::load(task_.model, checkpoint);
    do {
      train();
      if (is_restarted || steps_ + 1 != kRecoveryWarmup) continue;
      // As train::Checkpoint, under another name until it is whole.
      if (group_.rank() == 0) {
        torch::save(task_.model, checkpoint + ".tmp");
        std::filesystem::rename(checkpoint + ".tmp", checkpoint);
      }
      group_.barrier();
    } while (note_step(is_restarted ? 1 : 0, 1));
  }

 private:
  static void report(const std::string& line) {
    const std::string text = kRecoveryReport + line + "\n";
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }

  ProcessGroup group_;
  int first_rank_;
  StepTask task_;
  DistributedDataParallel<StepModel> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<Clock::time_point> last_;
  Clock::duration longest_{};
  std::uint64_t changes_ = 0;
  int steps_ = 0, steps_after_ = 0;
};

}  // namespace

int run_recovery_rank(const RecoveryRankOptions& options) {
  torch::set_num_threads(1);
  const std::vector<char> resident(static_cast<std::size_t>(options.resident_mib) << 20, 1);
  const bool is_elastic = options.system == "elastic";
  RecoveryTraining training(init_process_group({.backend = "shm", .elastic = is_elastic}), options);
  if (is_elastic) {
    training.run_elastic();
  } else {
    training.run_restarted(options.checkpoint);
  }
  return resident.empty() || resident.back() == 1 ? 0 : 1;  // Keeps the memory until here.
}

}  // namespace ddpkit::bench
