// A rank on a GPU throws, is late or hangs. The others report the fault and the rank.
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include <ddpkit/ddpkit.h>

#include "gpu/gpu.h"
#include "gpu/models.h"
#include "support/ranks.h"

namespace {

using ddpkit::ProcessGroup;
using std::chrono::milliseconds, std::chrono::steady_clock;

constexpr std::chrono::seconds kTimeout(1);
constexpr int kLastStep = 3;

void on_gpus(const std::string& name, int ranks, const std::function<void(ProcessGroup&)>& body,
             const std::vector<std::pair<std::string, std::string>>& environment = {}) {
  ddpkit::testing::on_ranks(name, ranks, body, {.backend = "nccl", .device = torch::kCUDA, .environment = environment});
}

std::int64_t now_ms() {
  return std::chrono::duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count();
}

/// Trains until the step in which rank 1 fails, then waits for the device.
void train(const ProcessGroup& group, const std::function<void(torch::nn::Sequential&, const torch::Tensor&)>& fail) {
  auto net = gpu::net();
  net->to(group.device());
  ddpkit::DistributedDataParallel ddp(net, group, gpu::small_buckets());
  for (int step = 0; step <= kLastStep; ++step) {
    ddpkit::set_step(step);
    const auto output = ddp(torch::ones({4, 12}, torch::kDouble).to(group.device()));
    if (step == kLastStep && group.rank() == 1) fail(net, output);
    gpu::loss_of(output).backward();
    static_cast<void>(net->parameters()[0].grad().sum().item<double>());
    group.check();
  }
}

/// Returns the message of the E that `call` throws in time.
template <class E>
std::string failure_of(const std::function<void()>& call, milliseconds limit) {
  const auto begin = steady_clock::now();
  try {
    call();
  } catch (const E& error) {
    CHECK(steady_clock::now() - begin < limit);
    if (error.context().rank) CHECK(error.context().rank == 1);
    return error.what();
  }
  return "threw nothing";
}

}  // namespace

TEST_CASE("a rank that throws ends the collectives of the other GPUs within a second", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("a rank that throws ends the collectives of the other GPUs within a second", 3, [](ProcessGroup& group) {
    for (const std::string key : {"backward", "beside", "abort"}) {
      std::string message;
      const auto store = group.store();
      try {
        const auto used = *group.split({0, 1, 2});
        train(used, [&](torch::nn::Sequential&, const torch::Tensor& output) {
          const auto fail = [&](const torch::Tensor& = {}) {
            const std::string now = std::to_string(now_ms());
            store->set(key, std::vector<std::uint8_t>(now.begin(), now.end()));
            throw std::runtime_error("no such luck");
          };
          if (key == "abort") used.abort("no such luck");
          if (key != "backward") fail();
          output.register_hook([=](const torch::Tensor& gradient) { fail(gradient); });
        });
      } catch (const ddpkit::PeerLost& error) {
        CHECK(error.context().rank == 1);
        message = error.what();
      } catch (const std::runtime_error& error) {
        message = error.what();
      }
      const std::int64_t ended = now_ms();
      if (group.rank() == 1) {
        CHECK(message == "no such luck");
      } else {
        CHECK_THAT(message, ContainsSubstring("rank 1 aborted: "));
        if (key == "abort") CHECK_THAT(message, ContainsSubstring("no such luck"));
        const auto thrown = store->get(key);
        CHECK(ended - std::stoll(std::string(thrown.begin(), thrown.end())) < 1000);
      }
      group.barrier();
    }
  });
}

TEST_CASE("a rank that comes late to a bucket on 3 GPUs is named with the bucket", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("a rank that comes late to a bucket on 3 GPUs is named with the bucket", 3, [](ProcessGroup& group) {
    const auto sleep = [](torch::nn::Sequential& net, const torch::Tensor&) {
      net->parameters()[2].register_hook([](const torch::Tensor&) { std::this_thread::sleep_for(3 * kTimeout); });
    };
    const auto message = failure_of<ddpkit::Timeout>(
        [&] { train(ddpkit::init_process_group({.backend = "nccl", .timeout = kTimeout}), sleep); }, 4 * kTimeout);
    CHECK_THAT(message, ContainsSubstring(" timed out after 1.0 s in all_reduce number ") &&
                            ContainsSubstring(", bucket 2) at step 3, waiting for rank 1, which is in "));
    CHECK_THAT(message, ContainsSubstring(", bucket 1) at step 3"));  // The position of rank 1's last collective.
    group.barrier();
  });
}

TEST_CASE("a collective that all of 3 virtual GPUs have called and that hangs is named", "[gpu]") {
  NEEDS_GPUS(3);
  NEEDS_VIRTUAL_GPUS();
  const auto body = [](ProcessGroup& group) {
    const auto timed = ddpkit::init_process_group({.backend = "nccl", .timeout = kTimeout});
    const auto tensor = torch::ones({5}).to(group.device());
    const auto message = failure_of<ddpkit::Timeout>(
        [&] {
          for (int i = 0; i < 5; ++i) timed.broadcast(tensor);
          static_cast<void>(tensor.cpu());
          timed.check();
        },
        2 * kTimeout);
    CHECK_THAT(message, ContainsSubstring(" timed out after 1.0 s in broadcast number 2 (20 bytes, group 1); all ranks "
                                          "have called it"));
    CHECK(failure_of<ddpkit::Timeout>([&] { timed.barrier(); }, kTimeout) == message);
    group.barrier();
  };
  on_gpus("a collective that all of 3 virtual GPUs have called and that hangs is named", 3, body,
          {{"VGPU_FAULT", "rank=1 call=Broadcast n=3 do=hang"}});
}

TEST_CASE("an error that NCCL reports on one of 3 virtual GPUs ends all ranks", "[gpu]") {
  NEEDS_GPUS(3);
  NEEDS_VIRTUAL_GPUS();
  const auto body = [](ProcessGroup& group) {
    const auto inner = *group.split({0, 1, 2});
    const auto tensor = torch::ones({5}).to(group.device());
    const auto message = failure_of<ddpkit::PeerLost>(
        [&] {
          inner.broadcast(tensor);
          static_cast<void>(tensor.cpu());
          inner.barrier();
        },
        milliseconds(1500));
    CHECK_THAT(message, ContainsSubstring("rank 1 aborted: NCCL error: ") && ContainsSubstring("ncclRemoteError"));
    group.barrier();
  };
  on_gpus("an error that NCCL reports on one of 3 virtual GPUs ends all ranks", 3, body,
          {{"VGPU_FAULT", "rank=1 call=Broadcast n=1 do=error"}});
}

TEST_CASE("virtual GPUs that call different collectives report each rank's call", "[gpu]") {
  NEEDS_GPUS(3);
  NEEDS_VIRTUAL_GPUS();
  const auto body = [](ProcessGroup& group) {
    const auto timed = ddpkit::init_process_group({.backend = "nccl", .timeout = kTimeout});
    const auto tensor = torch::ones({5}).to(group.device());
    const auto call = [&] {
      if (group.rank() == 1) {
        timed.broadcast(tensor);
      } else {
        timed.all_reduce(tensor);
      }
      static_cast<void>(tensor.cpu());
      timed.check();
    };
    const auto message = failure_of<ddpkit::Timeout>(call, 2 * kTimeout);
    CHECK_THAT(message, ContainsSubstring("in broadcast number 0"));
    CHECK_THAT(message, ContainsSubstring("in all_reduce number 0"));
    group.barrier();
  };
  on_gpus("virtual GPUs that call different collectives report each rank's call", 3, body, {{"VGPU_MISMATCH", "hang"}});
}
