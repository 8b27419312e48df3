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
    const auto updates = static_cast<std::int64_t>(sampler.num_samples() - 1) / given.batch_size + 1;
    run.print_batches(updates);
    run.start({.model = *model,
               .optimizer = optimizer,
               .wrapper = &ddp,
               .updates_per_epoch = updates,
               .state = {train::checkpoint_part("sampler", sampler)}},
              {{"data_set", "circle"}});
    while (run.has_epoch()) {
      sampler.set_epoch(static_cast<std::uint64_t>(run.epoch()));
      const std::vector<std::size_t> order = sampler.indices();  // of this rank, in the rest of the epoch
      const at::Tensor rows = torch::tensor(std::vector<std::int64_t>(order.begin(), order.end()));
      const std::vector<at::Tensor> batches = rows.to(group.device()).split(given.batch_size);
      train::Epoch epoch(run, static_cast<std::int64_t>(batches.size()), rows.numel() * group.world_size(), "points");
      double sum = 0, used = 0;
      for (std::size_t i = 0; epoch.next(); ++i) {
        optimizer.zero_grad();
        const at::Tensor loss =
            torch::cross_entropy_loss(ddp(points.index_select(0, batches[i])), inside.index_select(0, batches[i]));
        run.scaler().scale(loss).backward();  // exchanges the gradients
        run.step_optimizer();
        sum += loss.item<double>() * static_cast<double>(batches[i].numel());
        used += static_cast<double>(batches[i].numel());
        sampler.set_position(static_cast<std::size_t>(used));
        epoch.advance([&] { return fmt::format("loss={:.4f}", sum / used); });
      }
      const std::vector<double> sums = train::sum_over_ranks({sum, used}, group);
      const double loss = sums[0] / sums[1];
      if (!epoch.finish(loss)) break;
      sampler.set_epoch(static_cast<std::uint64_t>(run.epoch()));
      run.save();
      epoch.report(fmt::format("Train Loss: {:.4f}", loss), {{"train_loss", loss}}, {{"loss/train", loss}});
    }
    if (run.finish()) run.print_summary(fmt::format("{} updates", run.step()));
  });
}
