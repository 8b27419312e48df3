#include <torch/torch.h>

#include <ddpkit/parallel/distributed_data_parallel.h>

#include "ranks/deep_model.h"
#include "support/catch.h"
#include "support/ranks.h"

namespace {

ddpkit::BackwardTrace trace_of(ddpkit::ProcessGroup& group, const ddpkit::DistributedDataParallelOptions& options) {
  auto model = ddpkit::testing::deep_model();
  ddpkit::DistributedDataParallel ddp(model, group, options);
  ddp(torch::randn({16, 300})).sum().backward();
  return ddp.reducer().last_backward().value();
}

}  // namespace

RANK_TEST("the first bucket's all-reduce starts before backward's last gradient", "[ddp]", 2, 4) {
  const auto trace = trace_of(group, {.bucket_cap_mb = 0.3, .first_bucket_cap_mb = 0.3});
  REQUIRE(trace.buckets.size() == 6);
  CHECK(trace.buckets.front().started < trace.last_gradient);
  CHECK(trace.buckets.front().started >= trace.first_gradient);
  // All but the last bucket, which waits for the last gradient.
  for (std::size_t b = 0; b + 1 < trace.buckets.size(); ++b) CHECK(trace.buckets[b].started < trace.last_gradient);
  CHECK(trace.buckets.back().started >= trace.last_gradient);
}

RANK_TEST("one bucket cannot overlap, and the trace says so", "[ddp]", 2) {
  const auto trace = trace_of(group, {.bucket_cap_mb = 100, .first_bucket_cap_mb = 100});
  REQUIRE(trace.buckets.size() == 1);
  CHECK(trace.buckets.front().started >= trace.last_gradient);
}
