// Checkpoints of a fully sharded model between several GPUs.
#include <signal.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>

#include <ddpkit/train/checkpoint.h>

#include "gpu/gpu.h"
#include "gpu/models.h"
#include "ranks/comparisons.h"
#include "ranks/fully_sharded_training.h"
#include "support/folder.h"

using ddpkit::FullyShardedDataParallel, ddpkit::ProcessGroup;

namespace {

struct Job {
  explicit Job(ProcessGroup& group) : model(make(group)), fsdp(model, group, {.min_unit_mb = 0}) {}
  static std::shared_ptr<ddpkit::testing::LossModel> make(const ProcessGroup& group) {
    const auto model = ddpkit::testing::maker<ddpkit::testing::Cnn>(at::kFloat)();
    model->to(group.device());
    return model;
  }
  void train(int from, int to) {
    for (int step = from; step < to; ++step) {
      optimizer.zero_grad();
      fsdp(model->input(step, fsdp.group().rank(), at::kFloat).to(fsdp.group().device())).backward();
      optimizer.step();
    }
  }
  at::Tensor weights() {
    const auto whole = fsdp.whole();
    return ddpkit::testing::flat_parameters(*model).cpu();
  }
  std::shared_ptr<ddpkit::testing::LossModel> model;
  FullyShardedDataParallel<ddpkit::testing::LossModel> fsdp;
  ddpkit::optim::ShardedOptimizer<ddpkit::optim::FusedAdamW> optimizer{fsdp, ddpkit::testing::kAdamW};
};

}  // namespace

TEST_CASE("a killed fully sharded run on 2 GPUs resumes with the same bits", "[gpu][fsdp]") {
  NEEDS_GPUS(2);
  const ddpkit::testing::Folder folder;
  const std::string path = folder / "a.pt", expected = folder / "expected.pt";
  const std::string name = "a killed fully sharded run on 2 GPUs resumes with the same bits";
  const auto save_and_die = [&](ProcessGroup& group) {
    Job job(group);
    job.train(0, 2);
    ddpkit::train::Checkpoint(path, group, {.sharded = true}).save(*job.model, job.optimizer, {.epoch = 1, .step = 2});
    job.train(2, 4);
    const at::Tensor weights = job.weights();
    if (group.rank() == 0) torch::save(weights, expected);
    group.barrier();
    ::raise(SIGKILL);
  };
  gpu::on_gpus(name, 2, save_and_die, {}, {0, 1});
  gpu::on_gpus(name, 2, [&](ProcessGroup& group) {
    Job job(group);
    CHECK(ddpkit::train::load_checkpoint(path, *job.model, job.optimizer, group).step == 2);
    job.train(2, 4);
    at::Tensor weights;
    torch::load(weights, expected);
    CHECK(torch::equal(job.weights(), weights));
  });
}
