// Two ranks share one GPU and exchange through the host. The results are correct only if the order of streams is.
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <vector>

#include <ddpkit/ddpkit.h>

#include "gpu/gpu.h"
#include "gpu/models.h"
#include "support/ranks.h"

namespace {

using ddpkit::testing::on_ranks;

const ddpkit::testing::RankTestOptions kOnTheGpu{.device = at::Device(at::kCUDA, 0)};

torch::Tensor of_rank(int rank, std::int64_t numel) {
  return torch::arange(numel, torch::TensorOptions(torch::kFloat).device(torch::kCUDA)) + 100 * rank;
}

/// Keeps the device busy for a moment. Virtual GPUs delay the work of a stream anyway.
void burn() {
  const std::int64_t size = has_virtual_gpus() ? 64 : 2048;
  static const auto matrix = torch::full({size, size}, 1e-3, torch::kCUDA);
  auto product = matrix;
  for (int i = 0; i < 20; ++i) product = product.matmul(matrix);
}

void check_collectives(ddpkit::ProcessGroup& group) {
  const int ranks = group.world_size(), rank = group.rank();
  CHECK(group.backend_name() == "shm");
  CHECK(group.device() == at::Device(at::kCUDA, 0));
  for (int round = 0; round < 3; ++round) {
    auto tensor = torch::zeros({1 << 20}, torch::kCUDA);
    burn();
    tensor.fill_(rank + round);  // Runs long after the host has called all_reduce.
    group.all_reduce(tensor);
    CHECK((tensor == ranks * round + ranks * (ranks - 1) / 2).all().item<bool>());
  }
  auto from_last = of_rank(rank, 7);
  group.broadcast(from_last, ranks - 1);
  CHECK(torch::equal(from_last, of_rank(ranks - 1, 7)));
  const auto all = group.all_gather(of_rank(rank, 5));
  for (int r = 0; r < ranks; ++r) CHECK(torch::equal(all[r], of_rank(r, 5)));
  auto part = torch::zeros({3}, torch::kCUDA);
  group.reduce_scatter(part, of_rank(rank, 3 * ranks));
  CHECK(torch::equal(part, of_rank(0, 3 * ranks).narrow(0, 3 * rank, 3) * ranks + 50 * ranks * (ranks - 1)));
  CHECK(group.all_gather_bytes("gpu").size() == static_cast<std::size_t>(ranks));
  group.barrier();
  CHECK_THROWS_AS(group.send(part, (rank + 1) % ranks), ddpkit::InvalidArgument);
  auto on_host = torch::ones({2});
  group.all_reduce(on_host);
  CHECK(on_host[0].item<float>() == ranks);
}

void check_training(ddpkit::ProcessGroup& group) {
  const int rank = group.rank(), ranks = group.world_size();
  for (const bool views : {false, true}) {
    auto ours = gpu::net(), reference = gpu::net();
    auto options = gpu::small_buckets();
    options.gradient_as_bucket_view = views;
    ddpkit::DistributedDataParallel ddp(ours, group, options);
    torch::optim::SGD optimizer(ours->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD reference_optimizer(reference->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 10; ++step) {
      const auto joined = gpu::batch(step, 8 * ranks);
      optimizer.zero_grad();
      gpu::loss_of(ddp(joined.narrow(0, 8 * rank, 8))).backward();
      optimizer.step();
      reference_optimizer.zero_grad();
      gpu::loss_of(reference->forward(joined)).backward();
      reference_optimizer.step();
    }
    gpu::check_same(ours->parameters(), reference->parameters());
    for (const auto& parameter : ours->parameters()) {
      const auto all = group.all_gather(parameter.detach());
      CHECK(torch::equal(all[0], all[ranks - 1]));
    }
  }
}

void check_unused(ddpkit::ProcessGroup& group) {
  // Each rank skips a different layer.
  torch::nn::ModuleList layers(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
  layers->to(torch::kCUDA);
  ddpkit::DistributedDataParallel ddp(layers, group, {.find_unused_parameters = true});
  for (int step = 0; step < 3; ++step) {
    layers->zero_grad();
    const int used = (group.rank() + step) % 2;
    layers[used]->as<torch::nn::Linear>()->forward(torch::ones({2, 4}, torch::kCUDA)).sum().backward();
    for (const auto& parameter : layers->parameters()) {
      REQUIRE(parameter.grad().defined());
      CHECK((parameter.grad() == 1).all().item<bool>());  // 2 samples on one of 2 ranks.
    }
  }
}

void check_released(ddpkit::ProcessGroup& group) {
  const int ranks = group.world_size(), rank = group.rank();
  for (int round = 0; round < 5; ++round) {
    auto part = torch::zeros({1 << 16}, torch::kCUDA);
    auto work = group.reduce_scatter_async(part, of_rank(rank, (1 << 16) * ranks));  // Only the queue has the input.
    std::vector<torch::Tensor> reused;
    for (int i = 0; i < 4; ++i) reused.push_back(torch::zeros({(1 << 16) * ranks}, torch::kCUDA));
    work.wait();
    const auto sum = of_rank(0, (1 << 16) * ranks) * ranks + 50 * ranks * (ranks - 1);
    CHECK(torch::equal(part, sum.narrow(0, (1 << 16) * rank, 1 << 16)));
    for (const auto& tensor : reused) CHECK((tensor == 0).all().item<bool>());
  }
}

void check_overlap(ddpkit::ProcessGroup& group) {
  const auto tensor = torch::full({1000}, group.rank(), torch::kCUDA);
  const auto store = group.store();
  if (group.rank() == 1) store->wait({"computed"});
  auto work = group.all_reduce_async(tensor);
  if (group.rank() == 0) {
    CHECK_FALSE(work.is_completed());
    CHECK(torch::ones({10}, torch::kCUDA).sum().item<float>() == 10);  // Rank 1 has not called all_reduce yet.
    store->set("computed", std::vector<std::uint8_t>());
  }
  work.wait();
  CHECK((tensor == 1).all().item<bool>());
}

void check_second_gpu(ddpkit::ProcessGroup& group) {
  const c10::DeviceGuard on_first(at::Device(at::kCUDA, 0));
  const auto tensor = torch::full({1000}, group.rank() + 1, at::Device(at::kCUDA, 1));
  group.all_reduce(tensor);
  CHECK((tensor == 3).all().item<bool>());
  CHECK_THROWS_WITH(group.all_reduce(torch::ones({3}, at::Device(at::kCUDA, 0))),
                    ContainsSubstring("this group's device is cuda:1, the tensor's cuda:0"));
  group.all_reduce(tensor);
  CHECK((tensor == 6).all().item<bool>());
}

/// Starts collectives of two groups in another order on each rank.
void check_crossed(ddpkit::ProcessGroup& group) {
  const std::vector<ddpkit::ProcessGroup> groups = {*group.split({0, 1}), *group.split({0, 1})};
  for (int round = 0; round < 5; ++round) {
    std::vector<torch::Tensor> tensors = {of_rank(group.rank(), 1000), of_rank(group.rank(), 5000)};
    const int first = group.rank();
    std::vector<ddpkit::Work> works(2);
    for (const int i : {first, 1 - first}) works[i] = groups[i].all_reduce_async(tensors[i]);
    for (ddpkit::Work& work : works) work.wait();
    for (const torch::Tensor& tensor : tensors)
      CHECK(torch::equal(tensor, of_rank(0, tensor.numel()) + of_rank(1, tensor.numel())));
  }
}

/// Ends a group whose collectives are still queued.
void check_abandoned(ddpkit::ProcessGroup& group) {
  const auto tensor = torch::full({1 << 16}, 1, torch::kCUDA);
  {
    const auto inner = *group.split({0, 1});
    for (int i = 0; i < 3; ++i) static_cast<void>(inner.all_reduce_async(tensor));
  }
  std::vector<std::vector<double>> heap;  // Reuses memory that was freed too early.
  for (int i = 0; i < 1000; ++i) heap.emplace_back(10 + i % 50, 1.0);
  c10::impl::VirtualGuardImpl(c10::kCUDA).synchronizeDevice(0);
  CHECK((tensor == 8).all().item<bool>());  // Three sums of two ranks.
  group.barrier();
}

}  // namespace

TEST_CASE("two ranks on one GPU exchange its tensors through the host", "[gpu][ranks]") {
  NEEDS_GPU();
  on_ranks("two ranks on one GPU exchange its tensors through the host", 2, check_collectives, kOnTheGpu);
}

TEST_CASE("two ranks on one GPU train as one process on the joined batch", "[gpu][ranks]") {
  NEEDS_GPU();
  on_ranks("two ranks on one GPU train as one process on the joined batch", 2, check_training, kOnTheGpu);
}

TEST_CASE("ranks on one GPU may use different parameters", "[gpu][ranks]") {
  NEEDS_GPU();
  on_ranks("ranks on one GPU may use different parameters", 2, check_unused, kOnTheGpu);
}

TEST_CASE("the memory of a tensor that a staged collective reads is not reused", "[gpu][ranks]") {
  NEEDS_GPU();
  on_ranks("the memory of a tensor that a staged collective reads is not reused", 2, check_released, kOnTheGpu);
}

TEST_CASE("a staged collective that waits for a rank does not delay the caller's stream", "[gpu][ranks]") {
  NEEDS_GPU();
  on_ranks("a staged collective that waits for a rank does not delay the caller's stream", 2, check_overlap, kOnTheGpu);
}

TEST_CASE("staged collectives of the second GPU while the first one is current", "[gpu][ranks]") {
  NEEDS_GPUS(2);
  on_ranks("staged collectives of the second GPU while the first one is current", 2, check_second_gpu,
           {.device = at::Device(at::kCUDA, 1)});
}

TEST_CASE("two groups on one GPU may start staged collectives in different orders", "[gpu][ranks]") {
  NEEDS_GPU();
  on_ranks("two groups on one GPU may start staged collectives in different orders", 2, check_crossed,
           {.device = at::Device(at::kCUDA, 0), .environment = {{"VGPU_SERIAL_HOST_FUNC", "1"}}});
}

TEST_CASE("a group may end before its staged collectives", "[gpu][ranks]") {
  NEEDS_GPU();
  on_ranks("a group may end before its staged collectives", 2, check_abandoned, kOnTheGpu);
}

TEST_CASE("a step over shm is not captured, with a message", "[gpu][ranks]") {
  NEEDS_GPU();
  const auto body = [](ddpkit::ProcessGroup& group) {
    auto weight = torch::ones({4}, torch::kCUDA).requires_grad_(true);
    ddpkit::optim::FusedSGD optimizer({weight}, torch::optim::SGDOptions(0.1), {.capturable = true});
    ddpkit::optim::GraphedStep step(torch::Device(torch::kCUDA, 0), {&optimizer},
                                    [&](const std::vector<torch::Tensor>& inputs) {
                                      auto sum = inputs[0] * 1;
                                      group.all_reduce(sum);
                                      return std::vector{sum};
                                    },
                                    {.warmup_iterations = 3});
    const auto input = torch::ones({4}, torch::kCUDA);
    for (int call = 0; call < 3; ++call) CHECK(step({input})[0].sum().item<float>() == 8);
    CHECK_THROWS_WITH(step({input}),
                      ContainsSubstring("all_reduce: the shm backend ") && ContainsSubstring("use the nccl backend"));
    group.barrier();
    auto sum = torch::ones({4}, torch::kCUDA);
    group.all_reduce(sum);
    CHECK(sum.sum().item<float>() == 8);
  };
  on_ranks("a step over shm is not captured, with a message", 2, body, kOnTheGpu);
}

TEST_CASE("shm for a device's tensors is refused without such a device", "[gpu][no_gpu]") {
  if (torch::cuda::is_available()) DDPKIT_SKIP("this host has a GPU");
  CHECK_THROWS(ddpkit::init_process_group(
      {.backend = "shm", .device = at::Device(at::kCUDA, 0), .environment = ddpkit::LaunchEnvironment{}}));
}
