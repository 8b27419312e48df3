#include <torch/torch.h>

#include <ddpkit/train/metrics.h>

#include "support/catch.h"
#include "support/ranks.h"

using namespace ddpkit::train;

TEST_CASE("evaluation shares hold every index once", "[metrics]") {
  for (const int size : {0, 1, 2, 7, 8, 100}) {
    for (const int world_size : {1, 2, 3, 8}) {
      std::int64_t next = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        const IndexRange share = evaluation_share(size, rank, world_size);
        CHECK(share.begin == next);
        CHECK(share.size() >= size / world_size);
        CHECK(share.size() <= (size + world_size - 1) / world_size);
        next = share.end;
      }
      CHECK(next == size);
    }
  }
}

RANK_TEST("metrics over ranks are those of the whole set, without duplicates", "[metrics]", 1, 2, 3, 4) {
  torch::manual_seed(3);
  constexpr std::int64_t kSamples = 10;
  const at::Tensor logits = torch::randn({kSamples, 5});
  const at::Tensor targets = torch::randint(5, {kSamples});
  const double loss = torch::cross_entropy_loss(logits, targets).item<double>();
  const auto correct = logits.argmax(1).eq(targets).sum().item<std::int64_t>();

  const IndexRange share = evaluation_share(kSamples, group.rank(), group.world_size());
  ClassificationMetrics metrics(at::kCPU);
  // In batches of one or two, the last smaller.
  for (std::int64_t begin = share.begin; begin < share.end; begin += 2) {
    const std::int64_t end = std::min(begin + 2, share.end);
    const at::Tensor x = logits.slice(0, begin, end);
    const at::Tensor y = targets.slice(0, begin, end);
    metrics.add(x, y, torch::cross_entropy_loss(x, y));
  }
  const ClassificationResult result = metrics.reduce(group);
  CHECK(result.samples == kSamples);
  CHECK(result.accuracy == static_cast<double>(correct) / kSamples);
  CHECK(result.loss == Approx(loss).epsilon(1e-6));
  const at::Tensor bits = group.all_gather(torch::tensor({result.loss, result.accuracy}, torch::kDouble));
  for (int rank = 0; rank < group.world_size(); ++rank) CHECK(bits[rank].equal(bits[0]));
  CHECK(metrics.reduce(group).samples == kSamples);
}

RANK_TEST("a rank without samples takes part in the metrics", "[metrics]", 3) {
  ClassificationMetrics metrics(at::kCPU);
  if (group.rank() == 1) metrics.add(torch::eye(2), torch::tensor({0, 0}), torch::tensor(1.5));
  const ClassificationResult result = metrics.reduce(group);
  CHECK(result.samples == 2);
  CHECK(result.accuracy == 0.5);
  CHECK(result.loss == 1.5);
}

RANK_TEST("sums of counts are exact", "[metrics]", 2, 4) {
  const double large = 9007199254740992.0 / 4 - 1;  // Four of them are just below 2^53.
  const std::vector<double> sums = sum_over_ranks({large, static_cast<double>(group.rank())}, group);
  CHECK(sums[0] == large * group.world_size());
  CHECK(sums[1] == group.world_size() * (group.world_size() - 1) / 2);
}
