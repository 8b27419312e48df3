// Calls of c10d's NCCL backend that ddpkit has no function for, and the end of a device.
#define USE_C10D_NCCL  // The header is empty without it.
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <optional>

#include <ddpkit/ddpkit.h>

#include "gpu/gpu.h"
#include "gpu/models.h"
#include "support/captured_stderr.h"
#include "support/premul_sum.h"
#include "support/ranks.h"

namespace {

using ddpkit::ProcessGroup;

void on_gpus(const std::string& name, int ranks, const std::function<void(ProcessGroup&)>& body,
             const std::vector<std::pair<std::string, std::string>>& environment = {}) {
  ddpkit::testing::on_ranks(name, ranks, body, {.backend = "nccl", .device = torch::kCUDA, .environment = environment});
}

torch::Tensor of_rank(const ProcessGroup& group, at::ScalarType type) {
  return torch::full({600000}, group.rank() + 1, torch::TensorOptions(type).device(group.device()));
}

}  // namespace

TEST_CASE("a sum of scaled inputs between 3 GPUs", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("a sum of scaled inputs between 3 GPUs", 3, [](ProcessGroup& group) {
    for (const auto type : {torch::kFloat, torch::kDouble, torch::kHalf}) {
      // Each rank has another factor: 2, 4, 6. The sum is 1 * 2 + 2 * 4 + 3 * 6.
      const double factor = 2.0 * (group.rank() + 1);
      const auto reduced = [&](const c10d::ReduceOp& op) {
        std::vector<torch::Tensor> tensors{of_rank(group, type)};
        c10d::AllreduceOptions options;
        options.reduceOp = op;
        group.backend()->allreduce(tensors, options)->wait();
        return tensors[0];
      };
      CHECK((reduced(ddpkit::testing::premul_sum(factor)) == 28).all().item<bool>());
      const auto on_device = torch::full({1}, factor, torch::TensorOptions(type).device(group.device()));
      CHECK((reduced(ddpkit::testing::premul_sum(on_device)) == 28).all().item<bool>());
      CHECK((reduced(c10d::ReduceOp::SUM) == 6).all().item<bool>());
    }
  });
}

TEST_CASE("c10d removes a rank of 3 GPUs from a communicator", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("c10d removes a rank of 3 GPUs from a communicator", 3, [](ProcessGroup& group) {
    if (group.rank() != 1) {
      const auto smaller = group.backend()->shrink({1});
      CHECK(smaller->getSize() == 2);
      CHECK(smaller->getRank() == (group.rank() == 0 ? 0 : 1));
      std::vector<torch::Tensor> tensors{of_rank(group, torch::kFloat)};
      smaller->allreduce(tensors)->wait();
      CHECK((tensors[0] == 4).all().item<bool>());
      dynamic_cast<c10d::ProcessGroupNCCL&>(*smaller).shutdown();
    }
  });
}

TEST_CASE("c10d's backend of a group works only on the rank's GPU", "[gpu]") {
  NEEDS_GPUS(2);
  on_gpus("c10d's backend of a group works only on the rank's GPU", 2, [](ProcessGroup& group) {
    std::vector<torch::Tensor> elsewhere{torch::ones({3}, torch::Device(torch::kCUDA, 1 - group.device().index()))};
    CHECK_THROWS(group.backend()->allreduce(elsewhere));
    group.barrier();
  });
}

TEST_CASE("a barrier of a wrapped c10d group uses the GPU of the group", "[gpu]") {
  NEEDS_GPUS(2);
  on_gpus("a barrier of a wrapped c10d group uses the GPU of the group", 2, [](ProcessGroup& group) {
    const auto store = c10::make_intrusive<c10d::PrefixStore>("wrapped", group.store());
    const auto inner = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, group.rank(), group.world_size(),
                                                                   c10d::ProcessGroupNCCL::Options::create());
    // c10d would choose the GPU by the rank, with a warning.
    const ProcessGroup wrapped(inner, store, torch::Device(torch::kCUDA, 1 - group.device().index()));
    CHECK(ddpkit::testing::stderr_of([&] { wrapped.barrier(); }) == "");
    inner->shutdown();
  });
}

TEST_CASE("the first call of an nccl group on 2 GPUs may allocate memory, with and without multicast", "[gpu]") {
  NEEDS_GPUS(2);
  for (const std::string multicast : {"0", "1"}) {
    on_gpus("the first call of an nccl group on 2 GPUs may allocate memory, with and without multicast", 2,
            [](ProcessGroup& outer) {
              const auto group = *outer.split({0, 1});
              const auto memory = group.allocate({3, 1000}, torch::kFloat).fill_(group.rank() + 1);
              group.all_reduce(memory);
              CHECK((memory == 3).all().item<bool>());
            },
            {{"VGPU_MULTICAST", multicast}});
  }
}

namespace {

/// Trains on 3 GPUs; rank 1 loses its GPU. `keeps_group`: it does not leave the group before the others have failed.
void lose_gpu(const std::string& test, bool keeps_group) {
  const auto body = [=](ProcessGroup& outer) {
    std::optional<ProcessGroup> kept;
    const auto message = [&] {
      try {
        const auto group = *outer.split({0, 1, 2});
        if (keeps_group) kept = group;
        auto net = gpu::net();
        net->to(group.device());
        ddpkit::DistributedDataParallel ddp(net, group, gpu::small_buckets());
        ddpkit::optim::FusedAdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
        for (int step = 0; step < 20; ++step) {
          optimizer.zero_grad();
          gpu::loss_of(ddp(torch::ones({4, 12}, torch::kDouble).to(group.device()))).backward();
          optimizer.step();
          static_cast<void>(net->parameters()[0].sum().item<double>());
        }
        group.check();
        return std::string("no error");
      } catch (const ddpkit::PeerLost& error) {
        CHECK(error.context().rank == 1);
        return std::string(error.what());
      } catch (const std::exception& error) {
        return std::string(error.what());
      }
    }();
    CHECK_THAT(message, ContainsSubstring(outer.rank() == 1 ? "uncorrectable ECC error" : "rank 1 aborted: "));
    outer.store()->set("end of " + std::to_string(outer.rank()), std::vector<std::uint8_t>{});
    if (keeps_group) outer.store()->wait({"end of 0", "end of 2"});
  };
  on_gpus(test, 3, body, {{"VGPU_FAULT", "rank=1 call=AllReduce n=20 do=lost"}});
}

}  // namespace

TEST_CASE("a virtual GPU that is lost ends its rank with an error, and the others learn which", "[gpu]") {
  NEEDS_GPUS(3);
  NEEDS_VIRTUAL_GPUS();
  lose_gpu("a virtual GPU that is lost ends its rank with an error, and the others learn which", false);
}

TEST_CASE("a rank that has lost its virtual GPU and keeps the group is named to the others", "[gpu]") {
  NEEDS_GPUS(3);
  NEEDS_VIRTUAL_GPUS();
  lose_gpu("a rank that has lost its virtual GPU and keeps the group is named to the others", true);
}
