// The end of groups on several GPUs: shutdown(), the last handle, and the end of the program.
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include <ddpkit/ddpkit.h>

#include "gpu/captured.h"
#include "gpu/gpu.h"
#include "gpu/models.h"

namespace {

using ddpkit::ProcessGroup;
using gpu::Captured, gpu::on_gpus;
using std::chrono::milliseconds;

constexpr const char* kRefused = "the process group was shut down";

/// Each rank in turn is last in the last collective. `end` ends the group.
void check_last_collective(const ProcessGroup& group, const std::function<void(std::optional<ProcessGroup>&)>& end) {
  const int ranks = group.world_size();
  for (int last = 0; last < ranks; ++last) {
    auto inner = std::make_optional(ddpkit::init_process_group({.backend = "nccl"}));
    auto tensor = torch::full({100000}, group.rank() + 1.0F, group.device());
    if (group.rank() == last) std::this_thread::sleep_for(milliseconds(100));
    for (int i = 0; i < 5; ++i) inner->all_reduce(tensor, i == 0 ? ddpkit::ReduceOp::kSum : ddpkit::ReduceOp::kMax);
    end(inner);
    CHECK((tensor == ranks * (ranks + 1) / 2).all().item<bool>());
  }
}

}  // namespace

TEST_CASE("shutdown on 3 GPUs waits for the last collective of each rank", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("shutdown on 3 GPUs waits for the last collective of each rank", 3, [](ProcessGroup& group) {
    check_last_collective(group, [](std::optional<ProcessGroup>& inner) {
      CHECK(inner->shutdown());
      CHECK(inner->shutdown());
      CHECK_THROWS_WITH(inner->barrier(), ContainsSubstring(kRefused));
      CHECK_THROWS_WITH(inner->check(), ContainsSubstring(kRefused));
    });
  });
}

TEST_CASE("the last handle of a group on 3 GPUs waits for the last collective of each rank", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("the last handle of a group on 3 GPUs waits for the last collective of each rank", 3,
          [](ProcessGroup& group) { check_last_collective(group, [](auto& inner) { inner.reset(); }); });
}

TEST_CASE("shutdown on 3 GPUs returns false and names the missing rank", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("shutdown on 3 GPUs returns false and names the missing rank", 3, [](ProcessGroup& group) {
    const auto inner = ddpkit::init_process_group({.backend = "nccl"});
    auto tensor = torch::ones({5}).to(group.device());
    inner.all_reduce(tensor);
    if (group.rank() != 2) CHECK_FALSE(inner.shutdown(milliseconds(300)));
    group.barrier();
    const auto use = [&] {
      inner.all_reduce(tensor);
      static_cast<void>(tensor.cpu());
      inner.check();
    };
    CHECK_THROWS_WITH(use(), ContainsSubstring("shutdown: rank 2 did not come within 0.3 s"));
  });
}

TEST_CASE("shutdown on 3 virtual GPUs returns false when a collective hangs", "[gpu]") {
  NEEDS_GPUS(3);
  NEEDS_VIRTUAL_GPUS();
  const auto body = [](ProcessGroup& group) {
    const auto inner = ddpkit::init_process_group({.backend = "nccl"});
    auto tensor = torch::ones({5}).to(group.device());
    inner.broadcast(tensor);
    CHECK_FALSE(inner.shutdown(milliseconds(300)));
    CHECK_THROWS_WITH(inner.barrier(), ContainsSubstring("is in broadcast number 0"));
    static_cast<void>(tensor.cpu());  // The device does not hang.
    group.barrier();
  };
  on_gpus("shutdown on 3 virtual GPUs returns false when a collective hangs", 3, body,
          {{"VGPU_FAULT", "rank=1 call=Broadcast n=1 do=hang"}});
}

TEST_CASE("a captured step on 3 GPUs trains as the eager step does", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("a captured step on 3 GPUs trains as the eager step does", 3, [](ProcessGroup& group) {
    Captured captured(group);
    auto joint = Captured::on(group.device());
    torch::optim::SGD optimizer(joint->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int call = 0; call < 12; ++call) {
      captured(call);
      CHECK(captured.step.captured() == (call >= 3));
      torch::manual_seed(100 + call);
      optimizer.zero_grad();
      gpu::loss_of(joint->forward(torch::randn({12, 12}, torch::kDouble).to(group.device()))).backward();
      optimizer.step();
    }
    // Learning rates are float32 on the device.
    gpu::check_same(captured.net->parameters(), joint->parameters(), 1e-6);
  });
}

TEST_CASE("shutdown on 2 GPUs releases the graphs of the group", "[gpu]") {
  NEEDS_GPUS(2);
  on_gpus("shutdown on 2 GPUs releases the graphs of the group", 2, [](ProcessGroup& group) {
    const auto inner = ddpkit::init_process_group({.backend = "nccl"});
    Captured captured(inner);
    for (int call = 0; call < 6; ++call) captured(call);
    const auto weights = captured.net->parameters()[0].detach().clone();
    CHECK(inner.shutdown());
    CHECK_THROWS_WITH(captured(6), ContainsSubstring(kRefused));
    CHECK(torch::equal(captured.net->parameters()[0], weights));
    group.barrier();
  });
}

TEST_CASE("a graph and its group on 2 GPUs may end in both orders", "[gpu]") {
  NEEDS_GPUS(2);
  on_gpus("a graph and its group on 2 GPUs may end in both orders", 2, [](ProcessGroup& group) {
    for (const bool graph_first : {true, false}) {
      auto inner = std::make_optional(ddpkit::init_process_group({.backend = "nccl"}));
      auto captured = std::make_unique<Captured>(*inner);
      for (int call = 0; call < 6; ++call) (*captured)(call);
      if (graph_first) captured.reset();
      inner.reset();
      if (captured) CHECK(std::isfinite((*captured)(6).item<double>()));
    }
    group.barrier();
  });
}
