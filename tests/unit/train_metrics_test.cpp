#include <torch/torch.h>

#include <thread>

#include <ddpkit/error.h>
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
  ClassificationMetrics metrics(5);
  // Batches of two; the last may have one.
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
  ClassificationMetrics metrics(2);
  if (group.rank() == 1) metrics.add(torch::eye(2), torch::tensor({0, 0}), torch::tensor(1.5));
  const ClassificationResult result = metrics.reduce(group);
  CHECK(result.samples == 2);
  CHECK(result.accuracy == 0.5);
  CHECK(result.loss == 1.5);
}

RANK_TEST("confusion and F1 include all ranks", "[metrics]", 1, 2, 3) {
  // The last of four classes never occurs. [sample]
  const std::vector<std::int64_t> targets = {0, 0, 0, 1, 1, 2, 0, 1};
  const std::vector<std::int64_t> predicted = {0, 0, 1, 1, 0, 1, 0, 1};
  const IndexRange share = evaluation_share(8, group.rank(), group.world_size());
  ClassificationMetrics metrics(4);
  for (std::int64_t i = share.begin; i < share.end; ++i) {
    const auto k = static_cast<std::size_t>(i);
    metrics.add(at::one_hot(torch::tensor({predicted[k]}), 4).to(at::kFloat), torch::tensor({targets[k]}),
                torch::tensor(1.0));
  }
  const ClassificationResult result = metrics.reduce(group);
  using Row = std::vector<std::int64_t>;
  CHECK(result.confusion == std::vector<Row>{Row{3, 1, 0, 0}, Row{1, 2, 0, 0}, Row{0, 1, 0, 0}, Row{0, 0, 0, 0}});
  CHECK(result.accuracy == 5.0 / 8);
  // Precision 3/4 and recall 3/4; 2/4 and 2/3; no correct prediction; no sample.
  const std::vector<double> f1 = result.f1();
  CHECK(f1[0] == Approx(0.75));
  CHECK(f1[1] == Approx(2 * 0.5 * (2.0 / 3) / (0.5 + 2.0 / 3)));
  CHECK(f1[2] == 0);
  CHECK(f1[3] == 0);
  CHECK(result.macro_f1() == Approx((f1[0] + f1[1]) / 3));
}

RANK_TEST("threads add predictions to the same metrics", "[metrics]", 1) {
  ClassificationMetrics metrics(3);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) metrics.add_predictions(torch::eye(3), torch::tensor({0, 1, 1}));
    });
  }
  for (std::thread& thread : threads) thread.join();
  metrics.add_loss(torch::tensor(0.5), 600);
  const ClassificationResult result = metrics.reduce(group);
  CHECK(result.samples == 600);
  CHECK(result.loss == 0.5);
  CHECK(result.confusion[1][1] == 200);
  CHECK(result.confusion[1][2] == 200);
  CHECK_THROWS_AS(metrics.add_predictions(torch::eye(2), torch::tensor({0, 1})), ddpkit::InvalidArgument);
}

RANK_TEST("the peak memory of each rank", "[metrics]", 1, 3) {
  // Rank 2 touches 64 MiB more.
  std::vector<char> touched(group.rank() == 2 ? 64 << 20 : 1, 1);
  const auto bytes = peak_memory_of_ranks(group);
  REQUIRE(static_cast<int>(bytes.size()) == group.world_size());
  for (const std::int64_t rank : bytes) CHECK(rank > (1 << 20));
  if (group.world_size() == 3) CHECK(bytes[2] > bytes[1] + (32 << 20));
  CHECK(touched.back() == 1);
}

RANK_TEST("sums of counts are exact", "[metrics]", 2, 4) {
  const double large = 9007199254740992.0 / 4 - 1;  // The sum of four is just below 2^53.
  const std::vector<double> sums = sum_over_ranks({large, static_cast<double>(group.rank())}, group);
  CHECK(sums[0] == large * group.world_size());
  CHECK(sums[1] == group.world_size() * (group.world_size() - 1) / 2);
}
