// DataParallel together with DistributedDataParallel. tests/unit/data_parallel_*_test.cpp test DataParallel alone.
#include <torch/torch.h>

#include <ddpkit/parallel/data_parallel.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::DataParallel;
using ddpkit::DistributedDataParallel;
using torch::Tensor;

namespace {

constexpr std::int64_t kPerRank = 5;

torch::nn::Sequential make_model() {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Conv1d(torch::nn::Conv1dOptions(6, 9, 3)), torch::nn::Tanh(),
                              torch::nn::Flatten(), torch::nn::Linear(9 * 10, 50), torch::nn::Tanh(),
                              torch::nn::Linear(50, 4));
  model->to(torch::kDouble);
  return model;
}

/// The joined batch of a step: rank r has samples [r * kPerRank, (r + 1) * kPerRank).
torch::data::Example<> batch_of(std::uint64_t step, int ranks) {
  torch::manual_seed(100 + step);
  const std::int64_t samples = kPerRank * ranks;
  return {torch::randn({samples, 6, 12}, torch::kDouble), torch::randint(4, {samples}, torch::kLong)};
}

Tensor loss_of(const Tensor& output, const Tensor& target) { return torch::cross_entropy_loss(output, target); }

void check_equal(const torch::nn::Sequential& model, const torch::nn::Sequential& reference) {
  for (std::size_t i = 0; i < model->parameters().size(); ++i)
    CHECK(at::allclose(model->parameters()[i], reference->parameters()[i], 0, 1e-10));
}

template <class Step>
torch::nn::Sequential train(const torch::nn::Sequential& model, int ranks, const Step& step) {
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  for (std::uint64_t i = 0; i < 20; ++i) {
    optimizer.zero_grad();
    step(batch_of(i, ranks));
    optimizer.step();
  }
  return model;
}

}  // namespace

RANK_TEST("DataParallel trains as DistributedDataParallel and as one device", "[dp]", 2, 3) {
  const int ranks = group.world_size();
  auto model = make_model();
  DistributedDataParallel ddp(model, group);
  train(model, ranks, [&](const auto& batch) {
    const auto mine = [&](const Tensor& tensor) { return tensor.narrow(0, group.rank() * kPerRank, kPerRank); };
    loss_of(ddp(mine(batch.data)), mine(batch.target)).backward();
  });
  if (group.rank() != 0) return;

  auto alone = make_model();
  train(alone, ranks, [&](const auto& batch) { loss_of(alone->forward(batch.data), batch.target).backward(); });
  check_equal(model, alone);

  auto stepped = make_model();
  DataParallel dp(stepped, {.replicas = ranks});
  train(stepped, ranks, [&](const auto& batch) {
    dp.train_step(batch, [](torch::nn::SequentialImpl& replica, const auto& part) {
      return loss_of(replica.forward(part.data), part.target);
    });
  });
  check_equal(stepped, alone);
  check_equal(stepped, model);

  auto gathered = make_model();
  DataParallel gathers(gathered, {.replicas = ranks});
  train(gathered, ranks, [&](const auto& batch) { loss_of(gathers(batch.data), batch.target).backward(); });
  check_equal(gathered, alone);
}
