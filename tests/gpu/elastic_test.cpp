// Elastic groups on nccl: the loss of a rank, after which the others continue.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddpkit/ddpkit.h>

#include "gpu/gpu.h"
#include "gpu/models.h"
#include "ranks/elastic_loss.h"
#include "support/catch.h"
#include "support/folder.h"

namespace {

using ddpkit::InvalidArgument, ddpkit::PeerLost, ddpkit::ProcessGroup;
using ddpkit::testing::die;
using ddpkit::testing::Folder;
using ddpkit::testing::read_file;

constexpr int kStep = 2, kSteps = 5;  ///< Complete steps before the deaths, and in all.

struct Death {
  int rank = 1;
  std::string point;
  int step = kStep;
};

ProcessGroup elastic_group() {
  return ddpkit::init_process_group({.backend = "nccl", .timeout = std::chrono::seconds(60), .elastic = true});
}

/// Writes weights, buffers and random numbers to `folder`/RANK, where RANK is the number at the start.
void train(const std::vector<Death>& deaths, const Folder& folder) {
  const ProcessGroup group = elastic_group();
  const int first_rank = group.rank();
  const ddpkit::optim::Elastic* self = nullptr;
  const auto reach = [&](const std::string& point) {
    for (const Death& death : deaths) {
      if (death.rank == first_rank && death.point == point && death.step == self->steps()) die();
    }
  };
  torch::manual_seed(5);
  torch::nn::Sequential model(torch::nn::Linear(12, 40), torch::nn::BatchNorm1d(40), torch::nn::Tanh(),
                              torch::nn::Dropout(0.3), torch::nn::Linear(40, 3));
  const torch::Tensor inputs = torch::randn({64, 12}).to(group.device());
  model->to(group.device());
  torch::manual_seed(100 + static_cast<std::uint64_t>(first_rank));
  ddpkit::DistributedDataParallel ddp(model, group, gpu::small_buckets());
  ddpkit::optim::FusedAdam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));
  ddpkit::DistributedSampler sampler(64, group);
  at::Generator generator = at::globalContext().defaultGenerator(group.device());
  ddpkit::optim::Elastic elastic(ddp, sampler, {.on_change = [&](const ddpkit::Regroup&) { reach("regroup"); }});
  self = &elastic;
  model->parameters().back().register_hook([&](const torch::Tensor&) { reach("first gradient"); });
  model->parameters().front().register_hook([&](const torch::Tensor&) { reach("last gradient"); });
  do {
    sampler.reset();
    while (elastic.steps() < kSteps) {
      const auto indices = sampler.next(4);
      REQUIRE(indices);
      const torch::Tensor chosen =
          torch::tensor(std::vector<std::int64_t>(indices->begin(), indices->end())).to(group.device());
      reach("step");
      const bool complete = elastic.step(4, [&] {
        optimizer.zero_grad();
        const torch::Tensor output = ddp(inputs.index_select(0, chosen));
        generator.set_current_seed(generator.current_seed() + 1);  // Virtual GPUs draw from the generator of the CPU.
        reach("forward");
        output.pow(2).sum().backward();
        reach("backward");
        optimizer.step();
      });
      if (!complete) break;
      if (elastic.steps() != kStep) continue;
      elastic.retry([&] {
        reach("retry");
        group.barrier();
      });
    }
  } while (elastic.interrupted());
  std::ofstream file(folder / std::to_string(first_rank), std::ios::binary);
  std::vector<torch::Tensor> values = model->parameters();
  for (const torch::Tensor& buffer : model->buffers()) values.push_back(buffer);
  values.push_back(torch::randn({4}));
  values.push_back(torch::rand({4}, torch::TensorOptions(group.device())));
  values.push_back(torch::tensor(static_cast<std::int64_t>(generator.current_seed())));
  for (const torch::Tensor& value : values) {
    const torch::Tensor dense = value.detach().cpu().contiguous();
    file.write(static_cast<const char*>(dense.const_data_ptr()), static_cast<std::streamsize>(dense.nbytes()));
  }
}

/// Compares with a training in which the ranks leave before step `lost`.
void compare(const char* name, const std::vector<Death>& deaths, int lost = kStep) {
  constexpr int kRanks = 3;
  std::vector<int> doomed;
  std::vector<Death> leaving;
  for (const Death& death : deaths) {
    doomed.push_back(death.rank);
    leaving.push_back({.rank = death.rank, .point = "step", .step = lost});
  }
  CAPTURE(deaths.front().rank, deaths.front().point);
  const Folder disturbed, calm;
  gpu::on_gpus(
      name, kRanks, [&](ProcessGroup&) { train(deaths, disturbed); }, {}, doomed);
  gpu::on_gpus(
      name, kRanks, [&](ProcessGroup&) { train(leaving, calm); }, {}, doomed);
  for (int rank = 0; rank < kRanks; ++rank) {
    if (std::ranges::count(doomed, rank) > 0) continue;
    const std::string result = read_file(calm / std::to_string(rank));
    CHECK(!result.empty());
    CHECK((result == read_file(disturbed / std::to_string(rank))));
  }
}

}  // namespace

TEST_CASE("the survivors of 3 GPUs continue after the loss of a rank", "[gpu]") {
  NEEDS_GPUS(3);
  const char* name = "the survivors of 3 GPUs continue after the loss of a rank";
  for (const char* point : {"forward", "first gradient"}) compare(name, {{.rank = 0, .point = point}});
  for (const char* point : {"last gradient", "retry"}) compare(name, {{.rank = 2, .point = point}});
  // The others have all gradients, and complete the step.
  compare(name, {{.rank = 1, .point = "backward"}}, kStep + 1);
  compare(name, {{.rank = 1, .point = "forward"}, {.rank = 2, .point = "regroup"}});
}

TEST_CASE("an elastic group of 3 GPUs shrinks twice", "[gpu]") {
  NEEDS_GPUS(3);
  gpu::on_gpus("an elastic group of 3 GPUs shrinks twice", 3,
               [](ProcessGroup& outer) {
                 const ProcessGroup group = elastic_group();
                 const int first_rank = outer.rank();
                 CHECK_THROWS_AS(group.shrink(), InvalidArgument);
                 const torch::Tensor sum = torch::full({100000}, first_rank).to(group.device());
                 group.all_reduce(sum);
                 CHECK(sum.eq(3).all().item<bool>());
                 for (const int lost : {0, 2}) {
                   if (first_rank == lost) die();
                   // Complete on no rank: the result must not be used.
                   if (lost == 0) {
                     CHECK_THROWS_AS(group.all_reduce(sum), PeerLost);
                   } else {
                     ddpkit::Work work = group.all_reduce_async(sum);
                     while (!work.is_completed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                     CHECK_THROWS_AS(work.wait(), PeerLost);
                   }
                   CHECK(group.shrink().lost == std::vector<int>{lost == 0 ? 0 : 1});
                   sum.fill_(first_rank);
                   group.all_reduce(sum);
                   CHECK(sum.eq(lost == 0 ? 3 : 1).all().item<bool>());
                 }
               },
               {}, {0, 2});
}

TEST_CASE("an elastic collective of 3 GPUs is complete when its wait returns", "[gpu]") {
  NEEDS_GPUS(3);
  gpu::on_gpus("an elastic collective of 3 GPUs is complete when its wait returns", 3, [](ProcessGroup&) {
    ::setenv("VGPU_ORDER", "ignore", 1);  // Virtual GPUs would want an event that the other stream waits for.
    const ProcessGroup group = elastic_group();
    const torch::Tensor data = torch::ones({4 << 20}, torch::TensorOptions(group.device()));
    const auto* const implementation = c10::impl::getDeviceGuardImpl(c10::kCUDA);
    const c10::Stream other = implementation->getStreamFromGlobalPool(group.device());
    for (const float sum : {3.F, 9.F, 27.F, 81.F, 243.F}) {
      group.all_reduce(data);
      const c10::StreamGuard on_other(other);
      CHECK(data[-1].item<float>() == sum);
    }
    ddpkit::Work work = group.all_reduce_async(data);
    while (!work.is_completed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    work.wait();
    CHECK(data.eq(729).all().item<bool>());
    CHECK(group.shutdown());
  });
}

TEST_CASE("Elastic on 3 GPUs undoes nothing that cannot be undone", "[gpu]") {
  NEEDS_GPUS(3);
  gpu::on_gpus("Elastic on 3 GPUs undoes nothing that cannot be undone", 3,
               [](ProcessGroup& outer) {
                 const ProcessGroup group = elastic_group();
                 torch::nn::Linear model(12, 3);
                 model->to(group.device());
                 ddpkit::DistributedDataParallel ddp(model, group);
                 ddpkit::DistributedSampler sampler(64, group);
                 const torch::Tensor inputs = torch::ones({4, 12}).to(group.device());
                 ddpkit::testing::check_torn_step(ddp, sampler, inputs, outer.rank() == 2);
               },
               {}, {2});
}

TEST_CASE("a graph on 2 GPUs cannot contain collectives of an elastic group", "[gpu]") {
  NEEDS_GPUS(2);
  gpu::on_gpus("a graph on 2 GPUs cannot contain collectives of an elastic group", 2, [](ProcessGroup&) {
    const ProcessGroup group = elastic_group();
    torch::nn::Linear model(12, 3);
    model->to(group.device());
    ddpkit::DistributedDataParallel ddp(model, group);
    ddpkit::optim::FusedSGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1), {.capturable = true});
    ddpkit::optim::GraphedStep step(group.device(), {&optimizer},
                                    [&](const std::vector<torch::Tensor>& batch) {
                                      optimizer.zero_grad();
                                      const torch::Tensor loss = ddp(batch[0]).sum();
                                      loss.backward();
                                      optimizer.step();
                                      return std::vector{loss.detach()};
                                    },
                                    {.warmup_iterations = 3});
    const torch::Tensor inputs = torch::ones({4, 12}).to(group.device());
    for (int i = 0; i < 3; ++i) step({inputs});
    CHECK_THROWS_WITH(step({inputs}), ContainsSubstring("collectives of a group with InitOptions::elastic"));
  });
}

TEST_CASE("a second rank ends while the others of 4 GPUs connect again", "[gpu]") {
  NEEDS_GPUS(4);
  NEEDS_VIRTUAL_GPUS();
  using Environment = std::vector<std::pair<std::string, std::string>>;
  const Environment ends_in_nccl{{"VGPU_FAULT", "rank=0 call=CommInitRank n=3 do=die"}};
  for (const int delay_ms : {-1, 0, 5, 10, 20, 40}) {
    CAPTURE(delay_ms);
    gpu::on_gpus("a second rank ends while the others of 4 GPUs connect again", 4,
                 [&](ProcessGroup& outer) {
                   const ProcessGroup group = elastic_group();
                   const int first_rank = outer.rank();
                   if (first_rank == 3) die();
                   CHECK_THROWS_AS(group.barrier(), PeerLost);
                   std::thread killer;
                   if (first_rank == 0 && delay_ms >= 0)
                     killer = std::thread([=] {
                       std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
                       die();
                     });
                   std::size_t left = group.shrink().old_rank_of.size();
                   while (left > 2) {
                     try {
                       group.barrier();
                     } catch (const PeerLost&) {
                       left = group.shrink().old_rank_of.size();
                     }
                   }
                   const torch::Tensor sum = torch::full({1000}, first_rank).to(group.device());
                   group.all_reduce(sum);
                   CHECK(sum.eq(3).all().item<bool>());
                 },
                 delay_ms < 0 ? ends_in_nccl : Environment(), {3, 0});
  }
}
