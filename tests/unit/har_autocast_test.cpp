#include <torch/torch.h>

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/precision.h>

#include "har/dataset.h"
#include "har/generate.h"
#include "har/model.h"
#include "support/catch.h"
#include "support/folder.h"

namespace {

/// Returns the mean loss of the last epoch. Weights, batches and their order are the same in each call.
double final_loss(const har::Dataset& data, std::optional<torch::ScalarType> autocast_type) {
  constexpr std::int64_t kBatch = 30, kEpochs = 8;
  torch::manual_seed(11);
  const auto model = har::make_model({.mode = har::Mode::kCnn,
                                      .channels = data.channels(),
                                      .steps = data.steps(),
                                      .classes = data.classes(),
                                      .dropout = 0});
  ddpkit::optim::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  double sum = 0;
  for (std::int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    torch::manual_seed(static_cast<std::uint64_t>(epoch));
    const auto order = torch::randperm(data.train.size());
    sum = 0;
    for (std::int64_t begin = 0; begin < data.train.size(); begin += kBatch) {
      const auto indices = order.slice(0, begin, begin + kBatch);
      optimizer.zero_grad();
      torch::Tensor loss;
      {
        const ddpkit::optim::Autocast autocast(torch::kCPU, autocast_type.value_or(torch::kBFloat16),
                                               {.enabled = autocast_type.has_value()});
        const auto logits = model->forward(data.train.windows.index({indices}));
        CHECK(logits.scalar_type() == autocast_type.value_or(torch::kFloat));
        loss = torch::cross_entropy_loss(logits, data.train.labels.index({indices}));
      }
      loss.backward();
      optimizer.step();
      sum += loss.item<double>() * static_cast<double>(indices.size(0));
    }
  }
  return sum / static_cast<double>(data.train.size());
}

}  // namespace

TEST_CASE("the CNN trained in bfloat16 autocast reaches float32's loss within 2 %", "[har][precision][.long]") {
  const ddpkit::testing::Folder folder;
  har::generate_ucihar(folder / "data", {.train = 180, .test = 6, .steps = 64});
  const har::Dataset data = har::normalised(har::read_recordings(folder / "data"));
  const double single = final_loss(data, std::nullopt), mixed = final_loss(data, torch::kBFloat16);
  INFO("float32 " << single << ", bfloat16 " << mixed);
  CHECK(single < 0.7 * std::log(6));  // The model has learned: the comparison is not of two initial states.
  CHECK(mixed == Approx(single).epsilon(0.02));
  CHECK(mixed != single);
}
