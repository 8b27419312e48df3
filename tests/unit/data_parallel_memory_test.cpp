// DataParallel's memory: the bytes of each replica under train_step(), counted by a wrapper of LibTorch's allocator,
// and the arena.
#include <c10/core/CPUAllocator.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include <ddpkit/error.h>
#include <ddpkit/parallel/data_parallel.h>

#include "support/catch.h"

using ddpkit::DataParallel;
using ddpkit::InvalidArgument;
using torch::Tensor;

namespace {

constexpr std::size_t kReplicas = 4;

/// The replica of this thread; kReplicas: none.
thread_local std::size_t this_replica = kReplicas;

/// Counts the allocated bytes per replica, whichever thread frees them.
class CountingAllocator : public c10::Allocator {
 public:
  struct Count {
    std::atomic<std::int64_t> bytes{0};
    std::atomic<std::int64_t> peak{0};
  };

  c10::DataPtr allocate(std::size_t bytes) override {
    void* const memory = std::aligned_alloc(kHeader, kHeader + (bytes + kHeader - 1) / kHeader * kHeader);
    if (!memory) throw std::bad_alloc();
    Count& count = counts_[this_replica];
    const std::int64_t now = count.bytes += static_cast<std::int64_t>(bytes);
    std::int64_t peak = count.peak;
    while (now > peak && !count.peak.compare_exchange_weak(peak, now)) {
    }
    new (memory) Header{bytes, &count};
    // raw_allocate() requires the block as the context.
    void* const data = static_cast<char*>(memory) + kHeader;
    return {data, data, &free_block, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  Count& operator[](std::size_t replica) { return counts_[replica]; }

 private:
  /// Precedes each block.
  struct Header {
    std::size_t bytes;
    Count* count;
  };
  static constexpr std::size_t kHeader = 64;

  static void free_block(void* data) {
    if (!data) return;
    char* const memory = static_cast<char*>(data) - kHeader;
    const auto* const header = reinterpret_cast<const Header*>(memory);
    header->count->bytes -= static_cast<std::int64_t>(header->bytes);
    std::free(memory);
  }

  std::array<Count, kReplicas + 1> counts_;
};

/// Replaces LibTorch's CPU allocator during its lifetime.
struct Counting {
  Counting() { c10::SetAllocator(c10::kCPU, &counter); }
  ~Counting() { c10::SetAllocator(c10::kCPU, before); }
  c10::Allocator* before = c10::GetAllocator(c10::kCPU);
  CountingAllocator& counter = immortal();

 private:
  /// Never deleted, because blocks refer to it. A static pointer keeps it reachable for the leak checker.
  static CountingAllocator& immortal() {
    static auto& all = *new std::vector<CountingAllocator*>;
    return *all.emplace_back(new CountingAllocator);
  }
};

torch::nn::Sequential make_har_net() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Conv1d(torch::nn::Conv1dOptions(9, 64, 5).padding(2)), torch::nn::ReLU(),
                               torch::nn::Conv1d(torch::nn::Conv1dOptions(64, 64, 5).padding(2)), torch::nn::ReLU(),
                               torch::nn::Flatten(), torch::nn::Linear(64 * 64, 128), torch::nn::ReLU(),
                               torch::nn::Linear(128, 6));
}

}  // namespace

TEST_CASE("DataParallel's replicas hold as much memory as each other under train_step", "[dp]") {
  const Counting counting;
  CountingAllocator& allocator = counting.counter;
  auto net = make_har_net();
  ddpkit::DataParallel dp(net, {.replicas = kReplicas, .arena = false});  // An arena would replace the counter.
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  std::atomic<std::size_t> threads = 0;
  const auto x = torch::randn({256, 9, 64});
  const auto y = torch::randint(6, {256}, torch::kLong);
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    dp.train_step(std::make_tuple(x, y), [&](torch::nn::SequentialImpl& replica, const auto& part) {
      if (this_replica == kReplicas) this_replica = threads++;
      return torch::cross_entropy_loss(replica.forward(std::get<0>(part)), std::get<1>(part));
    });
    optimizer.step();
  }
  CHECK(threads == kReplicas);
  std::int64_t smallest = allocator[0].peak, largest = 0;
  for (std::size_t r = 0; r < kReplicas; ++r) {
    smallest = std::min<std::int64_t>(smallest, allocator[r].peak);
    largest = std::max<std::int64_t>(largest, allocator[r].peak);
  }
  INFO("the smallest peak is " << smallest << " bytes, the largest " << largest);
  CHECK(smallest > std::int64_t{4} << 20);
  CHECK(static_cast<double>(largest) <= 1.15 * static_cast<double>(smallest));
  // Between steps, only one set of gradients remains.
  std::int64_t parameters = 0, left = 0;
  for (const auto& parameter : net->parameters()) parameters += static_cast<std::int64_t>(parameter.nbytes());
  for (std::size_t r = 0; r < kReplicas; ++r) left += allocator[r].bytes;
  CHECK(left >= parameters);
  CHECK(left < parameters + (64 << 10));
}

TEST_CASE("DataParallel's arena serves its tensors, which outlive it", "[dp][arena]") {
  torch::nn::Sequential net(torch::nn::Linear(64, 512), torch::nn::Tanh(), torch::nn::Linear(512, 3));
  const Tensor batch = torch::randn({64, 64});
  const auto loss = [](torch::nn::SequentialImpl& replica, const Tensor& part) {
    return replica.forward(part).square().mean();
  };
  const int replicas = GENERATE(1, 2);
  CAPTURE(replicas);
  Tensor kept;
  {
    DataParallel dp(net, {.replicas = replicas, .threads_per_replica = 1});
    REQUIRE(dp.arena());
    for (int step = 0; step < 3; ++step) dp.train_step(batch, loss);
    const auto warm = *dp.arena();
    CHECK(warm.allocations > 0);
    CHECK(warm.peak > 512 * 64 * sizeof(float));
    for (int step = 0; step < 20; ++step) dp.train_step(batch, loss);
    // The arena reuses its blocks.
    CHECK(dp.arena()->reserved <= warm.reserved + (4 << 20));
    kept = dp(batch).detach() + 0;
    DataParallel second(net, {.replicas = 2});
    CHECK_FALSE(second.arena());
  }
  CHECK(at::allclose(kept, net->forward(batch), 0, 1e-5));
  CHECK_FALSE(DataParallel(net, {.replicas = replicas, .arena = false}).arena());
  CHECK_THROWS_AS(DataParallel(net, {.replicas = replicas, .arena_mb = -1}), InvalidArgument);
  // The arena is full: malloc provides the rest.
  DataParallel small(net, {.replicas = replicas, .threads_per_replica = 1, .arena_mb = 0.1});
  net->zero_grad();
  small.train_step(batch, loss);
  const Tensor gradient = net->parameters()[0].grad().clone();
  CHECK(small.arena()->refused > 0);
  net->zero_grad();
  net->forward(batch).square().mean().backward();
  CHECK(at::allclose(net->parameters()[0].grad(), gradient, 1e-4, 1e-6));
}
