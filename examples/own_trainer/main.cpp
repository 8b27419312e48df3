// A trainer on ddpkit::train::Run, with its own model: learns which points of a square are inside a circle.
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <ddpkit/ddpkit.h>
#include <ddpkit/train/main.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/run.h>

namespace train = ddpkit::train;

int main(int argc, char** argv) {
  train::Options options("own_trainer", "Learns which points of a square are inside a circle.");
  train::RunOptions given;
  given.epochs = 10;
  given.lr = 3e-2;
  std::int64_t width = 32;
  options.add("width", &width, "Width of the hidden layer").between(1, 4096);
  train::declare(options, given);
  options.remove({"grad_accum_steps", "max_grad_norm", "num_workers", "sync_batchnorm", "logging_steps"});  // not used
  return train::run_main(options, argc, argv, [&](train::Program& program) {
    const ddpkit::ProcessGroup group = program.join(given);
    train::Run run(given, options, group);
    auto model = run.make_model([&] {  // seeds the random generator: the same weights and points on all ranks
      return torch::nn::Sequential(torch::nn::Linear(2, width), torch::nn::ReLU(), torch::nn::Linear(width, 2));
    });
    const at::Tensor points = torch::rand({1024, 2}).to(group.device());
    const at::Tensor inside = ((points - 0.5).norm(2, 1) < 0.4).to(torch::kLong);
    ddpkit::DistributedDataParallel ddp(model, group);
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(given.lr));
    ddpkit::DistributedSampler sampler(1024, group, {.seed = given.seed});
    run.print_batches(run.batches_of(sampler.num_samples()));
    run.start({.model = *model, .optimizer = optimizer, .wrapper = &ddp, .sampler = &sampler},
              {{"data_set", "circle"}});
    while (run.has_epoch()) {
      train::Epoch epoch(run, "points");
      train::MeanLoss mean;
      double mean_of_ranks = 0;
      epoch.retry([&] {  // with --elastic, again after the loss of a rank
        for (std::int64_t i = 0; epoch.next(); ++i) {
          const at::Tensor rows = torch::tensor(epoch.batch(i)).to(group.device());  // of this rank
          optimizer.zero_grad();
          const at::Tensor loss =
              torch::cross_entropy_loss(ddp(points.index_select(0, rows)), inside.index_select(0, rows));
          run.scaler().scale(loss).backward();  // exchanges the gradients
          run.step_optimizer();
          mean.add(loss.item<double>(), static_cast<double>(rows.numel()));
          epoch.advance([&] { return mean.note(); });
        }
        mean_of_ranks = mean.reduce(group);
      });
      if (!epoch.finish(mean_of_ranks)) break;
      run.save();
      epoch.report(fmt::format("Train Loss: {:.4f}", mean_of_ranks), {{"train_loss", mean_of_ranks}},
                   {{"loss/train", mean_of_ranks}});
    }
    if (run.finish()) run.print_summary(fmt::format("{} updates", run.step()));
  });
}
