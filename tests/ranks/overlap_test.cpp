#include <torch/torch.h>

#include <ddpkit/parallel/distributed_data_parallel.h>

#include "ranks/deep_model.h"
#include "support/catch.h"
#include "support/ranks.h"

namespace {

ddpkit::DistributedDataParallelStats stats_of(ddpkit::ProcessGroup& group,
                                              const ddpkit::DistributedDataParallelOptions& options) {
  auto model = ddpkit::testing::deep_model();
  ddpkit::DistributedDataParallel ddp(model, group, options);
  ddp(torch::randn({16, 300})).sum().backward();
  return ddp.stats();
}

}  // namespace

RANK_TEST("the first bucket's all-reduce starts before backward's last gradient", "[ddp]", 2, 4) {
  const auto stats = stats_of(group, {.bucket_cap_mb = 0.3, .first_bucket_cap_mb = 0.3});
  REQUIRE(stats.buckets.size() == 6);
  CHECK(stats.buckets.front().started_us < stats.last_gradient_us);
  CHECK(stats.buckets.front().started_us >= 0);
  // All buckets but the last, which waits for the last gradient.
  for (std::size_t b = 0; b + 1 < stats.buckets.size(); ++b)
    CHECK(stats.buckets[b].started_us < stats.last_gradient_us);
  CHECK(stats.buckets.back().started_us >= stats.last_gradient_us);
}

RANK_TEST("one bucket cannot overlap, and the statistics report no overlap", "[ddp]", 2) {
  const auto stats = stats_of(group, {.bucket_cap_mb = 100, .first_bucket_cap_mb = 100});
  REQUIRE(stats.buckets.size() == 1);
  CHECK(stats.buckets.front().started_us >= stats.last_gradient_us);
}
