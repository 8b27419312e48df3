// Ranks that are threads: tensors that are reduced in place, in an arena, and in pieces through shared memory.
#include <ATen/ops/empty.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <deque>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <ddpkit/comm/process_group.h>

#include "comm/arena_allocator.h"
#include "ranks/thread_ranks.h"
#include "support/catch.h"

using namespace ddpkit::testing;
using ddpkit::ProcessGroup;
using ddpkit::Work;

namespace {

/// Returns tensors that all ranks reduce in place: equal sizes on all ranks, but different places.
std::vector<at::Tensor> scattered(const at::Tensor& memory, const std::vector<std::int64_t>& sizes, int rank,
                                  std::mt19937& own) {
  std::vector<at::Tensor> tensors;
  std::int64_t offset = rank;
  for (const std::int64_t size : sizes) {
    offset += static_cast<std::int64_t>(own() % 40);
    tensors.push_back(memory.narrow(0, offset, size));
    offset += size;
  }
  return tensors;
}

void reduce_in_place(ProcessGroup& group) {
  const int ranks = group.world_size(), me = group.rank();
  ddpkit::SymmetricMemory& symmetric = symmetric_memory(group);
  std::mt19937 shared(5), own(static_cast<unsigned>(me));
  constexpr std::int64_t kNumel = 80000;
  const at::Tensor memory[] = {group.allocate({kNumel}, at::kInt), group.allocate({kNumel}, at::kInt),
                               group.allocate({kNumel}, at::kInt)};
  const auto sum = [=](int number) -> Values {
    return [=](std::int64_t i) {
      std::int32_t total = 0;
      for (int r = 0; r < ranks; ++r) total += value(number, r, i);
      return total;
    };
  };
  struct Reduction {
    Work work;
    std::vector<at::Tensor> tensors;
    int number;
  };
  std::deque<Reduction> pending;
  const auto finish_one = [&] {
    Reduction& oldest = pending.front();
    oldest.work.wait();
    for (std::size_t i = 0; i < oldest.tensors.size(); ++i)
      check(oldest.tensors[i], sum(oldest.number + static_cast<int>(i)),
            "tensor " + std::to_string(i) + " of reduction " + std::to_string(oldest.number));
    pending.pop_front();
  };
  for (int number = 0; number < 120; ++number) {
    // Between them is a tensor in private memory, which is staged.
    const bool staged = shared() % 4 == 0;
    constexpr std::int64_t kSizes[] = {1, 16, 17, 1000, 1024, 20000};
    std::vector<std::int64_t> sizes(shared() % 10 == 0 ? 70 : 1 + shared() % 5);  // One collective takes at most 64.
    for (std::int64_t& size : sizes) size = kSizes[shared() % (sizes.size() > 5 ? 3 : 5)];
    if (shared() % 3 == 0) sizes[0] = kSizes[5];
    // With at most two calls in progress, a third of the memory is free. The free third differs between ranks.
    while (pending.size() > 2 || (!pending.empty() && own() % 2 == 0)) finish_one();
    std::vector<at::Tensor> tensors;
    if (staged) {
      tensors.push_back(at::empty({sizes[0]}, at::kInt));
    } else {
      tensors = scattered(memory[(number + me) % 3], sizes, me, own);
    }
    for (std::size_t i = 0; i < tensors.size(); ++i)
      fill(tensors[i], [&](std::int64_t k) { return value(number + static_cast<int>(i), me, k); });
    Work work = staged ? group.all_reduce_async(tensors[0])
                       : Work(symmetric.all_reduce_coalesced(tensors, c10d::ReduceOp(c10d::ReduceOp::SUM)));
    pending.push_back({std::move(work), std::move(tensors), number});
  }
  while (!pending.empty()) finish_one();
}

/// Copies tensors that the other ranks read in place. This rank writes them again as soon as it may.
void copy_from_where_they_lie(ProcessGroup& group) {
  const int ranks = group.world_size(), me = group.rank();
  constexpr std::int64_t kNumel = 9000;
  const at::Tensor memory = group.allocate({ranks * kNumel}, at::kInt);
  std::mt19937 shared(6);
  for (int number = 0; number < 200; ++number) {
    const auto mine = [=](std::int64_t i) { return value(number, me, i); };
    const auto root = static_cast<int>(shared() % static_cast<unsigned>(ranks));
    const std::string what = "call " + std::to_string(number);
    switch (shared() % 3) {
      case 0: {
        const at::Tensor tensor = memory.narrow(0, me, kNumel);
        fill(tensor, mine);
        group.broadcast(tensor, root);
        check(
            tensor, [=](std::int64_t i) { return value(number, root, i); }, what);
        break;
      }
      case 1: {
        const at::Tensor all = at::empty({ranks * kNumel}, at::kInt);
        fill(memory.narrow(0, 0, kNumel), mine);
        group.all_gather_into(all, memory.narrow(0, 0, kNumel));
        check(
            all, [=](std::int64_t i) { return value(number, static_cast<int>(i / kNumel), i % kNumel); }, what);
        break;
      }
      default: {
        const at::Tensor part = at::empty({kNumel}, at::kInt);
        fill(memory, mine);
        group.reduce_scatter(part, memory);
        const auto sum = [=](std::int64_t i) {
          std::int32_t total = 0;
          for (int r = 0; r < ranks; ++r) total += value(number, r, me * kNumel + i);
          return total;
        };
        check(part, sum, what);
        break;
      }
    }
  }
}

}  // namespace

TEST_CASE("ranks that are threads: tensors read in place", "[shm][threads]") {
  for (const int ranks : {2, 3, 4}) on_threads(ranks, copy_from_where_they_lie);
}

TEST_CASE("ranks that are threads: tensors reduced in place", "[shm][threads]") {
  for (const int ranks : {2, 3, 4}) on_threads(ranks, reduce_in_place);
}

TEST_CASE("ranks that are threads: tensors of an arena", "[shm][threads]") {
  REQUIRE_FALSE(ddpkit::ScopedArena::taken());
  on_threads(2, [](ProcessGroup& group) {
    const int me = group.rank();
    std::mt19937 own(static_cast<unsigned>(me));
    constexpr std::int64_t kNumel = 5000;
    std::vector<at::Tensor> outlives;
    for (int round = 0; round < 5; ++round) {
      // Each rank has a separate arena; LibTorch allocates from the arena that was opened last.
      auto arena = symmetric_memory(group).open_arena(std::size_t{4} << 20, std::size_t{1} << 20);
      require(arena != nullptr, "an arena");
      require(arena == symmetric_memory(group).open_arena(1, 0), "the arena there is");
      for (int number = 0; number < 40; ++number) {
        std::vector<at::Tensor> tensors, others;
        for (int i = 0; i < 3; ++i) {
          others.push_back(at::empty({kNumel + static_cast<std::int64_t>(own() % 100)}, at::kInt));
          tensors.push_back(arena->empty(kNumel + i, at::kInt));
          fill(tensors.back(), [&](std::int64_t k) { return value(number + i, me, k); });
          fill(others.back(), [&](std::int64_t) { return me; });
        }
        Work work(symmetric_memory(group).all_reduce_coalesced(tensors, c10d::ReduceOp(c10d::ReduceOp::SUM)));
        if (own() % 2 == 0) outlives.push_back(at::empty({kNumel}, at::kInt));
        while (outlives.size() > 10) outlives.erase(outlives.begin());
        work.wait();
        for (int i = 0; i < 3; ++i) {
          const auto index = static_cast<std::size_t>(i);
          check(
              tensors[index], [&](std::int64_t k) { return value(number + i, 0, k) + value(number + i, 1, k); },
              "a tensor of the arena");
          check(
              others[index], [&](std::int64_t) { return me; }, "a tensor beside");
        }
      }
      outlives.push_back(arena->empty(kNumel, at::kInt));
      fill(outlives.back(), [&](std::int64_t) { return round; });
      group.barrier();  // Otherwise a rank might see the other rank's arena as current when it opens the next.
      arena.reset();
      group.barrier();
      check(
          outlives.back(), [&](std::int64_t) { return round; }, "a tensor that outlives its arena");
    }
  });
  CHECK_FALSE(ddpkit::ScopedArena::taken());
}

TEST_CASE("ranks that are threads: a child process of one with an arena", "[shm][threads]") {
  on_threads(2, [](ProcessGroup& group) {
    const auto arena = symmetric_memory(group).open_arena(std::size_t{4} << 20, std::size_t{1} << 20);
    group.barrier();
    if (group.rank() == 0) {
      constexpr std::int64_t kNumel = 10000;
      at::Tensor inherited = at::empty({kNumel}, at::kInt);
      const pid_t child = ::fork();
      if (child == 0) {
        inherited.reset();
        const at::Tensor own = tensor_of(kNumel, [](std::int64_t i) { return static_cast<std::int32_t>(i); });
        ::_exit(own.const_data_ptr<std::int32_t>()[kNumel - 1] == kNumel - 1 ? 0 : 1);
      }
      int status = -1;
      require(::waitpid(child, &status, 0) == child, "the child's end");
      require(WIFEXITED(status) && WEXITSTATUS(status) == 0,
              "the child uses tensors; its status is " + std::to_string(status));
      fill(inherited, [](std::int64_t) { return 1; });
    }
    group.barrier();
  });
}

TEST_CASE("ranks that are threads: private memory of many chunks", "[shm][threads]") {
  // From the fifth chunk of 64 KiB on, each chunk except the last is copied in while an earlier chunk is reduced.
  on_threads(2, [](ProcessGroup& group) {
    const int me = group.rank();
    std::mt19937 shared(3), own(static_cast<unsigned>(me));
    constexpr std::int64_t kChunk = 65536 / sizeof(std::int32_t);
    std::deque<std::pair<Work, at::Tensor>> pending;
    int first = 0;
    const auto finish_one = [&] {
      pending.front().first.wait();
      const int number = first++;
      check(
          pending.front().second, [&](std::int64_t i) { return value(number, 0, i) + value(number, 1, i); },
          "all_reduce " + std::to_string(number));
      pending.pop_front();
    };
    for (int number = 0; number < 60; ++number) {
      const auto chunks = static_cast<std::int64_t>(1 + shared() % 13);
      const std::int64_t last[] = {0, 1, 17, kChunk - 1};
      const at::Tensor tensor = at::empty({chunks * kChunk + last[shared() % 4]}, at::kInt);
      fill(tensor, [&](std::int64_t i) { return value(number, me, i); });
      pending.emplace_back(group.all_reduce_async(tensor), tensor);
      while (pending.size() > 3 || (!pending.empty() && own() % 2 == 0)) finish_one();
    }
    while (!pending.empty()) finish_one();
  });
}
