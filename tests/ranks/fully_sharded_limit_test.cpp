// A model whose weights, gradients and optimizer state do not fit into the memory of one rank trains on four ranks.
#include <pthread.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/fully_sharded_data_parallel.h>
#include <ddpkit/scaling/memory.h>

#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::DistributedDataParallel, ddpkit::FullyShardedDataParallel, ddpkit::ProcessGroup;
using ddpkit::optim::FusedAdamW, ddpkit::optim::ShardedOptimizer;

namespace {

/// A shard on 4 ranks has 1 MiB, so it is allocated in separate pages. Gaps of the heap would add to the memory.
constexpr int kWidth = 1024, kLayers = 24;
constexpr double kUnit = 4.0 * kWidth * (kWidth + 1), kModel = kLayers * kUnit;
const ddpkit::FullyShardedOptions kOptions{.min_unit_mb = 0};

/// Limit of a process, for `bytes` of the formula.
double with_tolerance(double bytes) { return 1.15 * bytes + 10e6; }

double formula(const ProcessGroup& group) {
  const int prefetch = group.backend_name() == "shm" ? 0 : kOptions.prefetch;
  return ddpkit::scaling::fully_sharded_memory({.parameter_bytes = kModel, .unit_bytes = kUnit, .prefetch = prefetch},
                                               group.world_size())
      .total();
}

double bytes_in(const char* file, const std::string& key) {
  std::ifstream in(file);
  for (std::string word; in >> word;) {
    double kilobytes = 0;
    if (word == key && in >> kilobytes) return 1024 * kilobytes;
  }
  throw std::runtime_error(std::string(file) + " has no " + key);
}
/// Private writable memory, which RLIMIT_DATA limits.
double private_bytes() { return bytes_in("/proc/self/status", "VmData:"); }
/// Memory that the process has written to. Shared memory counts once for all ranks.
double written_bytes() { return bytes_in("/proc/self/smaps_rollup", "Pss_Dirty:"); }

/// The largest values since the construction.
class Peak {
 public:
  explicit Peak(double (*measure)()) : measure_(measure), before_(measure()) {}
  void sample() { peak_ = std::max(peak_, measure_() - before_); }
  double bytes() {
    sample();
    return std::exchange(peak_, 0);
  }

 private:
  double (*measure_)();
  double before_, peak_ = 0;
};

/// A layer that calls `sample` when forward and backward pass it.
torch::nn::Functional sampler(const std::function<void()>& sample) {
  return torch::nn::Functional([sample](const at::Tensor& x) {
    sample();
    if (x.requires_grad()) x.register_hook([sample](const at::Tensor&) { sample(); });
    return x;
  });
}

torch::nn::Sequential make_model(const std::function<void()>& sample, const ProcessGroup* group = nullptr) {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int i = 0; i < kLayers; ++i) {
    model->push_back(torch::nn::Linear(kWidth, kWidth));
    if (group) ddpkit::fully_shard(*model[model->size() - 1], *group, kOptions);
    sample();
    model->push_back(sampler(sample));
  }
  return model;
}

template <class Wrapper>
void train_steps(Wrapper& wrapper, torch::optim::Optimizer& optimizer, const std::function<void()>& sample) {
  double first = 0, last = 0;
  for (int step = 0; step < 3; ++step) {
    const at::Tensor error = wrapper(torch::ones({1, kWidth})).sub(1).pow(2).mean();
    error.backward();
    optimizer.step();
    sample();
    optimizer.zero_grad();
    last = error.item<double>();
    if (step == 0) first = last;
  }
  CHECK(last < first);
}

/// Small stacks: those of gloo's threads would count as private memory. Creates once what LibTorch creates once.
void prepare(const ProcessGroup& group) {
  pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  ::pthread_attr_setstacksize(&attributes, 256 << 10);
  ::pthread_setattr_default_np(&attributes);
  ::pthread_attr_destroy(&attributes);
  torch::nn::Sequential small(torch::nn::Linear(2, 2));
  FullyShardedDataParallel fsdp(small, group, kOptions);
  ShardedOptimizer<FusedAdamW> optimizer(fsdp, torch::optim::AdamWOptions(1e-4));
  fsdp(torch::ones({1, 2})).sum().backward();
  optimizer.step();
}

/// From now on, this process may have `bytes` more of private memory.
void limit_to(double bytes) {
  const auto most = static_cast<rlim_t>(private_bytes() + bytes);
  const rlimit limit{.rlim_cur = most, .rlim_max = most};
  REQUIRE(::setrlimit(RLIMIT_DATA, &limit) == 0);
}

void train_sharded_within_limit(ProcessGroup& group) {
  prepare(group);
  limit_to(with_tolerance(formula(group)));
  const auto model = make_model([] {}, &group);
  FullyShardedDataParallel fsdp(model, group, kOptions);
  ShardedOptimizer<FusedAdamW> optimizer(fsdp, torch::optim::AdamWOptions(1e-4));
  train_steps(fsdp, optimizer, [] {});
}

void train_replicated_within_limit(ProcessGroup& group) {
  prepare(group);
  limit_to(with_tolerance(formula(group)));
  std::string error = "none";
  try {
    const auto model = make_model([] {});
    DistributedDataParallel ddp(model, group);
    FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-4));
    train_steps(ddp, optimizer, [] {});
  } catch (const std::exception& exception) {
    error = exception.what();
  }
  CHECK_THAT(error, ContainsSubstring("can't allocate memory") || ContainsSubstring("bad_alloc"));
}

/// The formula is that of `ddpkit estimate`.
void check_process(ProcessGroup& group) {
  prepare(group);
  Peak memory(&written_bytes);
  int calls = 0;
  const auto sample = [&] {
    if (calls++ % 4 == 0) memory.sample();
  };
  const auto model = make_model(sample, &group);
  FullyShardedDataParallel fsdp(model, group, kOptions);
  // The shards, and the block that is being built with its copy for the other ranks.
  const double built = memory.bytes();
  CHECK(built < with_tolerance(kModel / group.world_size() + 2 * kUnit));
  ShardedOptimizer<FusedAdamW> optimizer(fsdp, torch::optim::AdamWOptions(1e-4));
  train_steps(fsdp, optimizer, sample);
  const double trained = memory.bytes();
  group.barrier();  // The share of a rank in shared memory grows when another rank ends.
  INFO("built " << built / 1e6 << " MB, trained " << trained / 1e6 << " MB, formula " << formula(group) / 1e6 << " MB");
  CHECK(trained < with_tolerance(formula(group)));
  CHECK(trained > 0.85 * formula(group) - 10e6);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define NEEDS_OWN_MEMORY() DDPKIT_SKIP("sanitizers need more memory than the model")
#else
#define NEEDS_OWN_MEMORY() static_cast<void>(0)
#endif

}  // namespace

TEST_CASE("a fully sharded model trains within a limit that is too small for a replica",
          "[ranks][fsdp][gloo][memory]") {
  NEEDS_OWN_MEMORY();
  const std::string name = "a fully sharded model trains within a limit that is too small for a replica";
  SECTION("sharded") { ddpkit::testing::on_ranks(name, 4, train_sharded_within_limit, {.backend = "gloo"}); }
  SECTION("replicated") { ddpkit::testing::on_ranks(name, 4, train_replicated_within_limit, {.backend = "gloo"}); }
}

TEST_CASE("a fully sharded process has the memory of the estimate", "[ranks][fsdp][gloo][memory]") {
  NEEDS_OWN_MEMORY();
  for (const std::string backend : {"gloo", "shm"})
    ddpkit::testing::on_ranks("a fully sharded process has the memory of the estimate", {2, 4}, check_process,
                              {.backend = backend});
}
