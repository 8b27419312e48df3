#include <cmath>
#include <stdexcept>

#include "support/catch.h"

#include <ddpkit/scaling/estimate.h>
#include <ddpkit/scaling/memory.h>
#include <ddpkit/scaling/nccl.h>

using namespace ddpkit::scaling;

namespace {

constexpr double kMiB = 1 << 20;

/// Returns a model whose all-reduces take the same time for each size.
AllReduceModel constant(double us) {
  return [us](double, int ranks) { return AllReduceTime{ranks > 1 ? us : 0, "constant"}; };
}

}  // namespace

TEST_CASE("alpha-beta models match their formulas", "[scaling]") {
  const AlphaBeta link{.alpha_us = 3, .bandwidth_GBps = 10};
  // 10 MB over 10 GB/s: 1,000 us.
  CHECK(ring(link)(10e6, 4).us == Approx(2 * 3 * 3 + 2 * .75 * 1000));
  CHECK(halving_doubling(link)(10e6, 4).us == Approx(2 * 2 * 3 + 2 * .75 * 1000));
  CHECK(double_tree(link)(10e6, 8).us == Approx(2 * 3 * 3 + 2 * 1000));
  CHECK(in_switch(link)(10e6, 8).us == Approx(3 + 1000));
  CHECK(ring({.alpha_us = 0, .bandwidth_GBps = 10, .reduce_GBps = 5})(10e6, 2).us == Approx(1000 + 1000));
  CHECK(ring(link)(10e6, 1).us == 0);
  // The tree is faster for a small size, the ring for a large size.
  const auto both = fastest({ring(link), double_tree(link)});
  CHECK(both(1000, 64).algorithm == "tree");
  CHECK(both(1e9, 64).algorithm == "ring");
  CHECK(bus_GBps(1e9, 1e6, 2) == Approx(1));
  CHECK_THROWS_AS(fastest({}), std::invalid_argument);
}

TEST_CASE("shared memory is bound by the rank and by the host", "[scaling]") {
  const auto model = shared_memory({.barrier_us = 1, .rank_GBps = 20, .host_GBps = 40});
  CHECK(model(10e6, 2).us == Approx(2 + 1000));
  CHECK(model(10e6, 8).us == Approx(2 + 4000));
  const auto hosts = hierarchical(model, ring({.alpha_us = 10, .bandwidth_GBps = 1}), 2);
  CHECK(hosts(10e6, 2).us == Approx(model(10e6, 2).us));
  CHECK(hosts(10e6, 4).us == Approx(model(10e6, 2).us + 2 * 10 + 10000));
  CHECK(hosts(10e6, 4).algorithm == "shm + ring");
}

TEST_CASE("a measured all-reduce is interpolated, for the ranks it was measured on", "[scaling]") {
  const auto model = measured({{2000, 4}, {1000, 3}, {4000, 10}}, 2);
  CHECK(model(500, 2).us == Approx(3));
  CHECK(model(1500, 2).us == Approx(3.5));
  CHECK(model(4000, 2).us == Approx(10));
  CHECK(model(8000, 2).us == Approx(20));
  CHECK(model(8000, 1).us == 0);
  CHECK_THROWS_WITH(model(1000, 3), "all-reduce was measured on 2 ranks, not on 3");
  CHECK_THROWS_AS(measured({}, 2), std::invalid_argument);
  CHECK_THROWS_AS(measured({{1000, 0}}, 2), std::invalid_argument);
}

TEST_CASE("an assumed step has DistributedDataParallel's buckets", "[scaling]") {
  const StepProfile profile = assume_step({.compute_us = 300, .other_us = 10, .parameter_bytes = 60 * kMiB});
  CHECK(profile.step_us() == Approx(310));
  CHECK(profile.backward_us == Approx(200));
  REQUIRE(profile.buckets.size() == 4);  // 1, 25, 25 and the remainder.
  CHECK(profile.buckets[0].bytes == kMiB);
  CHECK(profile.buckets[3].bytes == 9 * kMiB);
  CHECK(profile.buckets[1].ready_us == Approx(200. * 26 / 60));
  CHECK(profile.buckets[3].ready_us == Approx(200));
  CHECK(assume_step({.compute_us = 1, .parameter_bytes = 0}).buckets.empty());
  CHECK_THROWS_AS(assume_step({.compute_us = -1}), std::invalid_argument);
  CHECK_THROWS_AS(assume_step({.compute_us = NAN}), std::invalid_argument);
  CHECK_THROWS_AS(assume_step({.compute_us = 1, .backward_share = 1.5}), std::invalid_argument);
  // More buckets than memory can hold.
  CHECK_THROWS_WITH(assume_step({.compute_us = 1, .parameter_bytes = 4e30}),
                    ContainsSubstring("4e+30 bytes take 1.53e+23 buckets of 2.62e+07 bytes"));
  CHECK_THROWS_AS(assume_step({.compute_us = 1, .parameter_bytes = 4e6, .bucket_bytes = 1e-3}), std::invalid_argument);
  CHECK_THROWS_AS(assume_step({.compute_us = 1, .parameter_bytes = 4e6, .bucket_bytes = 5e-300}),
                  std::invalid_argument);
  CHECK(assume_step({.compute_us = 1, .parameter_bytes = 999'999, .bucket_bytes = 1, .first_bucket_bytes = 1})
            .buckets.size() == 999'999);
}

TEST_CASE("communication that does not overlap with backward is exposed", "[scaling]") {
  const StepProfile profile{
      .forward_us = 50, .backward_us = 100, .other_us = 10, .buckets = {{20, 1}, {60, 1}, {100, 1}}};
  // 20 to 50, 60 to 90, 100 to 130.
  StepPrediction step = predict_step(profile, constant(30), 2);
  CHECK(step.communication_us == Approx(90));
  CHECK(step.exposed_us == Approx(30));
  CHECK(step.us == Approx(190));
  // Each waits for the previous: 20 to 80, 80 to 140, 140 to 200.
  step = predict_step(profile, constant(60), 2);
  CHECK(step.exposed_us == Approx(100));
  // 60 of 90 overlap and slow compute down.
  step = predict_step(profile, constant(30), 2, {.contention = 1.5});
  CHECK(step.contention_us == Approx(30));
  CHECK(step.us == Approx(220));
  // The all-reduce needs the processor that computes.
  step = predict_step(profile, constant(30), 2, {.overlap = false});
  CHECK(step.exposed_us == Approx(90));
  CHECK(predict_step(profile, constant(30), 1).us == Approx(160));
  CHECK_THROWS_AS(predict_step(profile, constant(30), 0), std::invalid_argument);
}

TEST_CASE("each step waits for the slowest rank", "[scaling]") {
  StepProfile profile{.forward_us = 50, .backward_us = 45, .other_us = 5};
  for (int us = 50; us <= 150; ++us) profile.steps_us.push_back(us);  // Evenly distributed; the median is 100.
  // The larger of two values exceeds 50 + 100 q with probability 1 - q^2.
  CHECK(predict_step(profile, constant(0), 2).straggler_us == Approx(100 * std::sqrt(.5) - 50));
  CHECK(predict_step(profile, constant(0), 1).straggler_us == 0);
  CHECK(predict_step(profile, constant(0), 2, {.stragglers = false}).straggler_us == 0);
}

TEST_CASE("speed-up, efficiency, time and cost", "[scaling]") {
  const StepProfile profile{.forward_us = 50, .backward_us = 50, .buckets = {{0, 1}}};
  const auto estimates =
      estimate_training_speedup(profile, constant(75), {.devices = {1, 4}, .steps = 3.6e7, .price_per_hour = 2});
  REQUIRE(estimates.size() == 2);
  CHECK(estimates[0].speedup == 1);
  CHECK(estimates[0].hours == Approx(1));
  CHECK(estimates[0].cost == Approx(2));
  CHECK(estimates[1].step.us == Approx(125));
  CHECK(estimates[1].efficiency == Approx(.8));
  CHECK(estimates[1].speedup == Approx(3.2));
  CHECK(estimates[1].hours == Approx(1 / 3.2));
  CHECK(estimates[1].cost == Approx(2 / .8));
  CHECK(devices_at_efficiency(profile, constant(75), .9, 64) == 2);
  CHECK(devices_at_efficiency(profile, constant(75), .5, 64) == 0);
  CHECK_THROWS_AS(estimate_training_speedup({}, constant(1)), std::invalid_argument);
}

TEST_CASE("fully sharded training adds gathers to forward", "[scaling]") {
  const StepProfile profile{.forward_us = 40, .backward_us = 80, .other_us = 8, .buckets = {{40, 1}, {80, 1}}};
  // Two gathers of 10 in forward; the first one is exposed, as the all-reduce of 20 after backward is.
  const StepPrediction step = predict_step(profile, constant(20), 4, {.fully_sharded = true});
  CHECK(step.communication_us == Approx(60));
  CHECK(step.exposed_us == Approx(30));
  CHECK(step.us == Approx(120 + 2 + 30));
  CHECK(predict_step(profile, constant(20), 4, {.overlap = false, .fully_sharded = true}).us == Approx(120 + 2 + 60));
  // Gathers of 100 in a forward of 40.
  CHECK(predict_step(profile, constant(100), 4, {.fully_sharded = true}).exposed_us == Approx(40 + 200 - 80 + 60));
  CHECK(predict_step(profile, constant(0), 1, {.fully_sharded = true}).us == Approx(128));
}

TEST_CASE("the memory of a fully sharded rank", "[scaling]") {
  using ddpkit::scaling::fully_sharded_memory;
  const auto memory = fully_sharded_memory({.parameter_bytes = 800, .unit_bytes = 40, .root_bytes = 80}, 4);
  CHECK(memory.weights == 200);
  CHECK(memory.gradients == 200);
  CHECK(memory.optimizer == 400);
  CHECK(memory.whole_units == 160);
  CHECK(memory.gradients_in_progress == 160);
  CHECK(memory.total() == 1120);
  const auto half = fully_sharded_memory({.parameter_bytes = 800,
                                          .unit_bytes = 40,
                                          .root_bytes = 80,
                                          .optimizer_states = 1,
                                          .prefetch = 0,
                                          .gathered_fraction = .5},
                                         8);
  CHECK(half.optimizer == 100);
  CHECK(half.whole_units == 60);
  CHECK(half.gradients_in_progress == 80);
  CHECK(fully_sharded_memory({.parameter_bytes = 100, .unit_bytes = 100}, 1).whole_units == 100);  // It has one unit.
  CHECK_THROWS_AS(fully_sharded_memory({.parameter_bytes = -1}, 4), std::invalid_argument);
  CHECK_THROWS_AS(fully_sharded_memory({}, 0), std::invalid_argument);
}

TEST_CASE("a fixed global batch divides compute, a sharded update the update", "[scaling]") {
  StepProfile profile{.forward_us = 40, .backward_us = 80, .other_us = 8, .buckets = {{40, 1}, {80, 1}}};
  const StepOptions fixed{.fixed_global_batch = true};
  // Backward takes 20. The buckets are ready at 10 and 20; their all-reduces end at 25 and 40.
  const StepPrediction step = predict_step(profile, constant(15), 4, fixed);
  CHECK(step.exposed_us == Approx(20));
  CHECK(step.us == Approx(10 + 20 + 8 + 20));
  CHECK(predict_step(profile, constant(15), 4, {.fixed_global_batch = true, .sharded_update = true}).us ==
        Approx(10 + 20 + 2 + 20));
  CHECK(predict_step(profile, constant(15), 4, {.sharded_update = true}).us == Approx(120 + 2 + 15));
  CHECK(predict_step(profile, constant(15), 1, fixed).us == Approx(128));
  const auto estimates = estimate_training_speedup(
      profile, constant(15), {.devices = {1, 4}, .step = fixed, .steps = 3.6e9 / 128, .price_per_hour = 2});
  CHECK(estimates[0].hours == Approx(1));
  CHECK(estimates[1].speedup == Approx(128. / 58));
  CHECK(estimates[1].efficiency == Approx(128. / 58 / 4));
  CHECK(estimates[1].hours == Approx(58. / 128));
  CHECK(estimates[1].cost == Approx(4 * 2 * 58. / 128));
  CHECK(devices_at_efficiency(profile, constant(15), .5, 64) == 0);
  CHECK(devices_at_efficiency(profile, constant(15), .6, 64, fixed) == 4);
  // The steps' deviations scale in proportion.
  for (int us = 50; us <= 150; ++us) profile.steps_us.push_back(us);
  CHECK(predict_step(profile, constant(0), 2, fixed).straggler_us == Approx((100 * std::sqrt(.5) - 50) / 2));
}

TEST_CASE("NCCL's model has NCCL's figures", "[scaling]") {
  GpuCluster h100 = gpu_cluster("h100");
  h100.launch_us = 0;
  const auto model = nccl(h100);
  // From NCCL's tables for eight H100: ring/LL 15 us + n / 80.6 GB/s, NVLS 25 us + n / 272 GB/s.
  CHECK(model(1024, 8).us == Approx(15.0).epsilon(.01));
  CHECK(model(1024, 8).algorithm == "ring/LL");
  CHECK(model(1 << 20, 8).us == Approx(28.0).epsilon(.01));
  CHECK(model(1 << 30, 8).us == Approx(3973).epsilon(.01));
  CHECK(model(1 << 30, 8).algorithm == "NVLS/Simple");
  CHECK(bus_GBps(1 << 30, model(1 << 30, 8).us, 8) == Approx(473).epsilon(.01));
  // Between nodes, the network is the limit.
  for (const int gpus : {16, 64, 256}) {
    CAPTURE(gpus);
    const double busbw = bus_GBps(1 << 30, model(1 << 30, gpus).us, gpus);
    CHECK(busbw < 480);
    CHECK(busbw > 250);
    CHECK(model(1 << 20, gpus).us > model(1 << 20, gpus / 2).us);
  }
  CHECK(model(1e6, 1).us == 0);
  GpuCluster alone = h100;
  alone.network_GBps = 0;
  CHECK_THROWS_WITH(nccl(alone)(1e6, 9), "h100 has 8 GPUs and no network, not 9");
  CHECK_THROWS_WITH(gpu_cluster("h1000"), ContainsSubstring("there are h100, "));
}

TEST_CASE("no all-reduce is faster with more ranks on any cluster", "[scaling]") {
  for (const GpuCluster& cluster : gpu_clusters()) {
    CAPTURE(cluster.name);
    const auto model = nccl(cluster);
    for (double bytes = 1024; bytes <= 1e9; bytes *= 8) {
      CAPTURE(bytes);
      CHECK(std::isfinite(model(bytes, 2).us));
      CHECK(model(bytes, 4096).us > model(bytes, cluster.gpus_per_node).us);
      CHECK(model(2 * bytes, 64).us > model(bytes, 64).us * .95);
    }
  }
}
