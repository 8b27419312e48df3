// The statistics of DistributedDataParallel.
#include <torch/torch.h>

#include <chrono>
#include <thread>

#include <ddpkit/parallel/comm_hooks.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/parallel/power_sgd.h>

#include "ranks/deep_model.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::DistributedDataParallel;
using ddpkit::ProcessGroup;
using ddpkit::testing::deep_model;

namespace {

constexpr std::size_t kBytes = 6 * (300 * 300 + 300) * sizeof(float);

template <class Model>
void backward(DistributedDataParallel<Model>& ddp) {
  ddp(torch::randn({16, 300})).sum().backward();
}

}  // namespace

RANK_TEST("stats: steps, bytes, and each bucket's times in their order", "[ddp][stats]", 1, 2, 3) {
  auto model = deep_model();
  DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0.3, .first_bucket_cap_mb = 0.3});
  CHECK(ddp.stats().steps == 0);
  CHECK(ddp.stats().buckets.empty());
  CHECK(ddp.stats().hidden_share() == 0);
  for (int step = 0; step < 3; ++step) backward(ddp);
  {
    const auto guard = ddp.no_sync();
    backward(ddp);  // Not a separate step.
  }
  const auto stats = ddp.stats();
  CHECK(stats.steps == 3);
  CHECK(stats.rebuilds == 1);
  CHECK(stats.bytes == 3 * kBytes);
  CHECK(stats.sent_bytes == (group.world_size() > 1 ? 3 * kBytes : 0));
  REQUIRE(stats.buckets.size() == 6);
  std::size_t parameters = 0, bytes = 0;
  for (const auto& bucket : stats.buckets) {
    parameters += bucket.parameters;
    bytes += bucket.bytes;
    CHECK(bucket.ready_us >= 0);
    CHECK(bucket.ready_us <= bucket.started_us);
    CHECK(bucket.started_us <= bucket.done_us);
    CHECK(bucket.done_us <= stats.end_us);
    CHECK(bucket.ready_us <= stats.last_gradient_us);
  }
  CHECK(parameters == 12);
  CHECK(bytes == kBytes);
  CHECK(stats.buckets[0].ready_us < stats.last_gradient_us);
  CHECK(stats.buckets[5].ready_us == stats.last_gradient_us);
  CHECK(stats.last_gradient_us <= stats.end_us);
  CHECK(stats.hidden_us <= stats.communication_us);
  CHECK((stats.hidden_us > 0) == (group.world_size() > 1));
  CHECK(stats.hidden_share() <= 1);
}

RANK_TEST("stats: one bucket hides nothing", "[ddp][stats]", 2, 3) {
  auto model = deep_model();
  DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 100, .first_bucket_cap_mb = 100});
  backward(ddp);
  const auto stats = ddp.stats();
  REQUIRE(stats.buckets.size() == 1);
  CHECK(stats.communication_us > 0);
  CHECK(stats.hidden_us == 0);
}

RANK_TEST("stats: a bucket that finishes within backward is reported as finished", "[ddp][stats]", 2, 3) {
  auto model = deep_model();
  DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0.3, .first_bucket_cap_mb = 0.3});
  backward(ddp);
  // Every rank pauses within backward and calls a barrier in between, so the first bucket must have finished.
  for (std::size_t layer = 0; layer < 5; ++layer) {
    model->ptr(layer)->as<torch::nn::Linear>()->weight.register_hook(
        [&](const at::Tensor&) { std::this_thread::sleep_for(std::chrono::milliseconds(100)); });
  }
  backward(ddp);
  const auto stats = ddp.stats();
  CHECK(stats.buckets[0].done_us < stats.last_gradient_us);
}

RANK_TEST("stats: bytes that hooks send", "[ddp][stats][comm_hooks]", 2, 3) {
  auto model = deep_model();
  DistributedDataParallel ddp(model, group);
  const auto sent_by = [&](ddpkit::CommHook hook) {
    ddp.register_comm_hook(std::move(hook));
    const auto before = ddp.stats().sent_bytes;
    backward(ddp);
    return ddp.stats().sent_bytes - before;
  };
  namespace comm_hooks = ddpkit::comm_hooks;
  // Each gradient starts at a multiple of 64 bytes in a bucket's buffer: 12 gradients of 1,200 or 360,000 bytes.
  const std::size_t flat = 6 * (1216 + 360000);
  CHECK(sent_by(comm_hooks::all_reduce(group)) == flat);
  CHECK(sent_by(comm_hooks::fp16_compress(group)) == flat / 2);
  CHECK(sent_by(comm_hooks::bf16_compress(group)) == flat / 2);
  CHECK(sent_by(comm_hooks::bf16_compress_wrapper(comm_hooks::all_reduce(group))) == flat / 2);
  const comm_hooks::PowerSGD power_sgd(group, {.matrix_approximation_rank = 2, .start_powerSGD_iter = 0});
  CHECK(sent_by(power_sgd) == 6 * (2 * 2 * 300 + 300) * sizeof(float));
  CHECK(sent_by([](ddpkit::GradBucket&) -> ddpkit::BucketReduction { return {.sent_bytes = 5}; }) ==
        5 * ddp.stats().buckets.size());
}
