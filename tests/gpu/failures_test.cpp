// A rank on a GPU throws, is late or hangs. The others report the fault and the rank.
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include <ddpkit/ddpkit.h>

#include "gpu/captured.h"
#include "gpu/gpu.h"
#include "gpu/models.h"

namespace {

using ddpkit::ProcessGroup;
using gpu::on_gpus;
using std::chrono::milliseconds, std::chrono::steady_clock;

constexpr std::chrono::seconds kTimeout(1);
constexpr int kLastStep = 3;

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

/// Returns the message of the E that `call` throws.
template <class E>
std::string failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    if (error.context().rank) CHECK(error.context().rank == 1);
    return error.what();
  }
  return "threw nothing";
}

}  // namespace

TEST_CASE("a rank that throws ends the collectives of the other GPUs", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("a rank that throws ends the collectives of the other GPUs", 3, [](ProcessGroup& group) {
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
        WARN("rank " << group.rank() << " ended " << ended - std::stoll(std::string(thrown.begin(), thrown.end()))
                     << " ms after the failure of rank 1");
      }
      group.barrier();
    }
  });
}

TEST_CASE("a rank that leaves an nccl group is named to those that call one more collective", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("a rank that leaves an nccl group is named to those that call one more collective", 3,
          [](ProcessGroup& group) {
            for (const int leaver : {1, 0}) {
              std::optional<ProcessGroup> inner = group.split({0, 1, 2});
              const auto tensor = torch::ones({5}).to(group.device());
              inner->all_reduce(tensor);
              if (group.rank() == leaver) {
                inner.reset();
              } else {
                try {
                  inner->all_reduce(tensor);
                  static_cast<void>(tensor.cpu());
                  inner->check();
                  FAIL("no error");
                } catch (const ddpkit::PeerLost& error) {
                  CHECK(error.context().rank == leaver);
                  CHECK_THAT(error.what(), ContainsSubstring(") has left the group; rank ") &&
                                               ContainsSubstring("all_reduce number 1 (20 bytes, group "));
                }
              }
              group.barrier();
            }
          });
}

TEST_CASE("a rank that leaves an nccl group before its collective has ended is named", "[gpu]") {
  NEEDS_GPUS(2);
  on_gpus("a rank that leaves an nccl group before its collective has ended is named", 2, [](ProcessGroup& group) {
    std::optional<ProcessGroup> inner = group.split({0, 1});
    const auto tensor = torch::ones({5}).to(group.device());
    if (group.rank() == 1) {
      static_cast<void>(inner->all_reduce_async(tensor));
      inner.reset();
    }
    group.barrier();
    if (group.rank() != 0) return;
    const auto message = failure_of<ddpkit::PeerLost>([&] { inner->all_reduce(tensor); });
    CHECK(message == "rank 1 aborted: it left the group while its calls ran");
  });
}

TEST_CASE("a rank that comes late to a bucket on 3 GPUs is named with the bucket", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("a rank that comes late to a bucket on 3 GPUs is named with the bucket", 3, [](ProcessGroup& group) {
    const auto sleep = [](torch::nn::Sequential& net, const torch::Tensor&) {
      net->parameters()[2].register_hook([](const torch::Tensor&) { std::this_thread::sleep_for(3 * kTimeout); });
    };
    const auto message = failure_of<ddpkit::Timeout>(
        [&] { train(ddpkit::init_process_group({.backend = "nccl", .timeout = kTimeout}), sleep); });
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
    const auto message = failure_of<ddpkit::Timeout>([&] {
      for (int i = 0; i < 5; ++i) timed.broadcast(tensor);
      static_cast<void>(tensor.cpu());
      timed.check();
    });
    CHECK_THAT(message, ContainsSubstring(" timed out after 1.0 s in broadcast number 2 (20 bytes, group 1); all ranks "
                                          "have called it"));
    CHECK(failure_of<ddpkit::Timeout>([&] { timed.barrier(); }) == message);
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
    const auto message = failure_of<ddpkit::PeerLost>([&] {
      inner.broadcast(tensor);
      static_cast<void>(tensor.cpu());
      inner.barrier();
    });
    CHECK_THAT(message, ContainsSubstring("rank 1 aborted: NCCL error: ") && ContainsSubstring("ncclRemoteError"));
    group.barrier();
  };
  on_gpus("an error that NCCL reports on one of 3 virtual GPUs ends all ranks", 3, body,
          {{"VGPU_FAULT", "rank=1 call=Broadcast n=1 do=error"}});
}

TEST_CASE("NCCL refuses a call on one of 2 virtual GPUs after the other has failed: the error names that rank",
          "[gpu]") {
  NEEDS_GPUS(2);
  NEEDS_VIRTUAL_GPUS();
  const auto body = [](ProcessGroup& group) {
    const auto inner = *group.split({0, 1});
    const auto tensor = torch::ones({5}).to(group.device());
    if (group.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      inner.abort("no such luck");
    } else {
      const auto message = failure_of<ddpkit::PeerLost>([&] { inner.broadcast(tensor); });
      CHECK(message == "rank 1 aborted: no such luck");
    }
    group.barrier();
  };
  on_gpus("NCCL refuses a call on one of 2 virtual GPUs after the other has failed: the error names that rank", 2, body,
          {{"VGPU_FAULT", "rank=0 call=Broadcast n=1 do=refuse"}});
}

TEST_CASE("an abort waits until NCCL has started the call of another thread", "[gpu]") {
  NEEDS_GPUS(2);
  NEEDS_VIRTUAL_GPUS();
  const auto body = [](ProcessGroup& group) {
    const auto inner = *group.split({0, 1});
    const auto tensor = torch::ones({5}).to(group.device());
    if (group.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      inner.abort("no such luck");
    }
    const auto message = failure_of<ddpkit::PeerLost>([&] {
      inner.broadcast(tensor);
      static_cast<void>(tensor.cpu());
      inner.barrier();
    });
    CHECK(message == "rank 1 aborted: no such luck");
    group.barrier();
  };
  on_gpus("an abort waits until NCCL has started the call of another thread", 2, body,
          {{"VGPU_FAULT", "rank=0 call=Broadcast n=1 do=hold:600"}});
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
    const auto message = failure_of<ddpkit::Timeout>(call);
    CHECK_THAT(message, ContainsSubstring("in broadcast number 0"));
    CHECK_THAT(message, ContainsSubstring("in all_reduce number 0"));
    group.barrier();
  };
  on_gpus("virtual GPUs that call different collectives report each rank's call", 3, body, {{"VGPU_MISMATCH", "hang"}});
}

namespace {

/// Replays steps until one fails. Rank 1 calls `fail` before step 8. Returns the message of the E that a step throws.
template <class E>
std::string failure_of_replay(const ProcessGroup& group, const std::function<void()>& fail) {
  gpu::Captured captured(group);
  for (int step = 0; step < 60; ++step) {
    ddpkit::set_step(step);
    if (step == 8 && group.rank() == 1) fail();
    try {
      static_cast<void>(captured(step).item<double>());
      group.check();
    } catch (const E& error) {
      CHECK(captured.step.captured());
      CHECK_THROWS_WITH(captured(step), ContainsSubstring(error.what()));
      return error.what();
    }
  }
  return "threw nothing";
}

}  // namespace

TEST_CASE("a replay that hangs on 3 virtual GPUs is named", "[gpu]") {
  NEEDS_GPUS(3);
  NEEDS_VIRTUAL_GPUS();
  const auto body = [](ProcessGroup& group) {
    const auto timed = ddpkit::init_process_group({.backend = "nccl", .timeout = kTimeout});
    const auto message = failure_of_replay<ddpkit::Timeout>(timed, [] {});
    CHECK_THAT(message, ContainsSubstring(" timed out after 1.0 s in graph_replay number ") &&
                            ContainsSubstring(" at step ") && ContainsSubstring("; all ranks have called it"));
    group.barrier();
  };
  on_gpus("a replay that hangs on 3 virtual GPUs is named", 3, body,
          {{"VGPU_FAULT", "rank=1 call=AllReduce n=60 do=hang"}});
}

TEST_CASE("a rank on 3 GPUs that does not replay its graph is named", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("a rank on 3 GPUs that does not replay its graph is named", 3, [](ProcessGroup& group) {
    const auto timed = ddpkit::init_process_group({.backend = "nccl", .timeout = kTimeout});
    const auto message = failure_of_replay<ddpkit::Timeout>(timed, [] { std::this_thread::sleep_for(3 * kTimeout); });
    CHECK_THAT(message, ContainsSubstring(" in graph_replay number ") &&
                            ContainsSubstring(" at step 8, waiting for rank 1, which is in no collective; its last one "
                                              "was graph_replay number "));
    group.barrier();
  });
}

TEST_CASE("an abort by a rank on 3 GPUs ends the replays of the others", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("an abort by a rank on 3 GPUs ends the replays of the others", 3, [](ProcessGroup& group) {
    const auto inner = *group.split({0, 1, 2});
    const auto message = failure_of_replay<ddpkit::PeerLost>(inner, [&] { inner.abort("no such luck"); });
    CHECK(message == "rank 1 aborted: no such luck");
    group.barrier();
  });
}

TEST_CASE("a rank on 3 GPUs is killed between replays: the others end", "[gpu]") {
  NEEDS_GPUS(3);
  const auto body = [](ProcessGroup& group) {
    const auto message = failure_of_replay<ddpkit::PeerLost>(group, [] { ::raise(SIGKILL); });
    CHECK_THAT(message, ContainsSubstring("rank 1 (pid ") && ContainsSubstring("has ended"));
  };
  on_gpus("a rank on 3 GPUs is killed between replays: the others end", 3, body, {}, {1});
}
