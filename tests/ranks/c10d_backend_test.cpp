// The shm backend in programs that use c10d directly.
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>

#include <ddpkit/error.h>

#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::ProcessGroup;
using ddpkit::ReduceOp;

namespace {

torch::Tensor sparse_part(int rank, int ranks) {
  // Rank r has r entries; ranks share some of them.
  torch::manual_seed(static_cast<std::uint64_t>(rank));
  const torch::Tensor indices = torch::randint(0, 5, {2, rank}, at::kLong);
  return torch::sparse_coo_tensor(indices, torch::randint(-9, 9, {rank, 3}).to(at::kFloat), {5, 5 + ranks, 3});
}

/// An event of a profiler: its name, the number of its starts, and the sizes of its inputs.
struct Event {
  int begun = 0, ended = 0;
  std::vector<std::int64_t> sizes;
};
std::map<std::string, Event> events;

void watch_events() {
  at::addGlobalCallback(
      at::RecordFunctionCallback(
          [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
            Event& event = events[function.name()];
            ++event.begun;
            for (const c10::IValue& input : function.inputs()) {
              if (input.isTensor()) event.sizes = input.toTensor().sizes().vec();
            }
            return nullptr;
          },
          [](const at::RecordFunction& function, at::ObserverContext*) { ++events[function.name()].ended; })
          .needsInputs(true)
          .scopes({at::RecordScope::USER_SCOPE}));
}

}  // namespace

RANK_TEST("all_reduce of sparse tensors whose numbers of entries differ", "[shm]", 1, 2, 3) {
  for (const bool coalesced : {false, true}) {
    torch::Tensor tensor = sparse_part(group.rank(), group.world_size());
    if (coalesced) tensor = tensor.coalesce();
    group.all_reduce_async(tensor).wait();
    torch::Tensor expected = torch::zeros(tensor.sizes());
    for (int r = 0; r < group.world_size(); ++r) expected += sparse_part(r, group.world_size()).to_dense();
    CHECK(tensor.is_sparse());
    CHECK(tensor.to_dense().equal(expected));
  }
  torch::Tensor none = torch::sparse_coo_tensor({4, 4}, at::TensorOptions(at::kDouble));
  group.all_reduce_async(none).wait();
  CHECK(none._nnz() == 0);
  CHECK_THROWS_WITH(group.all_reduce_async(none, ReduceOp::kMax), ContainsSubstring("only the sum"));
  torch::Tensor other = torch::sparse_coo_tensor({4, 4 + group.rank()}, at::TensorOptions(at::kDouble));
  if (group.world_size() > 1)
    CHECK_THROWS_WITH(group.all_reduce_async(other), ContainsSubstring("rank 1 has Double of sizes [4, 5]"));
  group.barrier();
}

RANK_TEST("a profiler sees the collectives of the shm backend, with their sizes", "[shm]", 2) {
  const int peer = 1 - group.rank();
  const torch::Tensor tensor = torch::ones({3, 4}), both = torch::ones({2, 3, 4});
  watch_events();
  group.all_reduce_async(tensor).wait();
  group.all_reduce(tensor);
  group.broadcast(tensor, 0);
  group.reduce(tensor, 0);
  group.all_gather_into(both, tensor);
  group.all_gather_into_async(both, tensor).wait();
  group.reduce_scatter(tensor, both);
  group.gather(tensor, 0);
  group.scatter(tensor, both, 0);
  group.all_to_all(both, both.clone());
  if (group.rank() == 0) {
    group.send(tensor, peer);
  } else {
    group.recv(tensor, peer);
  }
  group.barrier();
  at::clearCallbacks();
  for (const auto& [name, times] : std::map<std::string, int>{{"shm:all_reduce", 2},
                                                              {"shm:broadcast", 1},
                                                              {"shm:reduce", 1},
                                                              {"shm:all_gather", 2},
                                                              {"shm:reduce_scatter", 1},
                                                              {"shm:gather", 1},
                                                              {"shm:scatter", 1},
                                                              {"shm:all_to_all", 1},
                                                              {group.rank() == 0 ? "shm:send" : "shm:recv", 1},
                                                              {"shm:barrier", 1}}) {
    CAPTURE(name);
    CHECK(events[name].begun == times);
    CHECK(events[name].ended == times);
  }
  CHECK(events["shm:all_reduce"].sizes == std::vector<std::int64_t>{3, 4});
  CHECK(events["shm:broadcast"].sizes == std::vector<std::int64_t>{3, 4});
}

RANK_TEST("monitoredBarrier names late ranks in the words of c10d", "[shm][errors]", 3) {
  const ProcessGroup inner = ddpkit::testing::another_group(group, "inner");
  c10d::BarrierOptions options;
  options.timeout = std::chrono::seconds(60);
  inner.backend()->monitoredBarrier(options, false);
  options.timeout = std::chrono::milliseconds(400);
  if (group.rank() == 0) {
    CHECK_THROWS_WITH(inner.backend()->monitoredBarrier(options, true),
                      ContainsSubstring("[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 400 ms") &&
                          ContainsSubstring("rank 0 timed out after"));
  }
  const ProcessGroup second = ddpkit::testing::another_group(group, "second");
  if (group.rank() == 0) {
    CHECK_THROWS_WITH(second.backend()->monitoredBarrier(options, false),
                      ContainsSubstring("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 400 ms"));
  }
  group.barrier();
}

RANK_TEST("callbacks and deleters may use the group", "[shm]", 2) {
  int freed = 0;
  float memory[10] = {};
  for (const bool turned : {false, true}) {
    const auto backend = group.backend();
    torch::Tensor tensor = torch::from_blob(memory, {2, 5}, [&freed, backend](void*) {
      backend->getSequenceNumberForGroup();  // Locks the mutex that guards the engine.
      ++freed;
    });
    if (turned) tensor = tensor.t();
    ddpkit::Work work = group.all_reduce_async(tensor);
    tensor.reset();
    work = ddpkit::Work();
    group.barrier();
  }
  CHECK(freed == 2);
}

RANK_TEST("the end of a child made by fork() is not the end of its rank", "[shm]", 2) {
  auto backend = ddpkit::testing::another_group(group, "inner").backend();
  const auto barrier = [&] { backend->barrier(c10d::BarrierOptions())->wait(); };
  barrier();
  if (group.rank() == 0) {
    const pid_t child = ::fork();
    if (child == 0) {
      backend.reset();
      ::_exit(0);
    }
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
  barrier();
}
