// Ranks that are threads: collectives and messages of all kinds and sizes, mixed at random.
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddpkit/comm/process_group.h>

#include "ranks/thread_ranks.h"
#include "support/catch.h"

using namespace ddpkit::testing;
using ddpkit::ProcessGroup;
using ddpkit::Work;

namespace {

/// Calls of random kinds and sizes on one group. Each rank waits at different times.
class MixedCalls {
 public:
  explicit MixedCalls(const ProcessGroup& group, unsigned seed = 1)
      : group_(group),
        ranks_(group.world_size()),
        me_(group.rank()),
        shared_(seed),
        own_(seed * 100 + static_cast<unsigned>(me_)),
        symmetric_(group.allocate({kSymmetric}, at::kInt)) {}

  void run(int calls) {
    for (int number = 0; number < calls; ++number) {
      start(number);
      while (pending_.size() > 20 || (!pending_.empty() && own_() % 3 == 0)) finish_one();
      if (own_() % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own_() % 2000));
    }
    finish_all();
    group_.barrier();
    inputs_.clear();
  }

 private:
  static constexpr std::int64_t kSymmetric = 100000;

  struct Expected {
    Work work;
    at::Tensor tensor;
    Values values;
    std::string what;
  };

  void start(int number) {
    const unsigned kind = shared_() % 9;
    constexpr std::int64_t kSizes[] = {0, 1, 17, 1000, 10000, 100000};  // Staged whole, in shares, in several chunks.
    const std::int64_t numel = kSizes[shared_() % 6];
    const int root = static_cast<int>(shared_() % static_cast<unsigned>(ranks_));
    const bool odd_one_out = shared_() % 5 == 0;
    const int next = (me_ + 1) % ranks_, before = (me_ + ranks_ - 1) % ranks_;
    const Values mine = [=, this](std::int64_t i) { return value(number, me_, i); };
    const Values sum = [=, this](std::int64_t i) {
      std::int32_t total = 0;
      for (int r = 0; r < ranks_; ++r) total += value(number, r, i);
      return total;
    };
    at::Tensor tensor;
    const auto expect = [&](Work work, Values values, const char* name) {
      pending_.push_back({std::move(work), tensor, std::move(values),
                          std::string(name) + " of " + std::to_string(numel) + ", call " + std::to_string(number)});
    };
    switch (kind) {
      case 0:
        tensor = tensor_of(numel, mine);
        expect(group_.all_reduce_async(tensor), sum, "all_reduce");
        break;
      case 1:
      case 2:
        // In symmetric memory; sometimes only one rank uses private memory.
        finish_all();
        tensor = odd_one_out && me_ == root ? at::empty({numel}, at::kInt) : symmetric_.narrow(0, 0, numel);
        fill(tensor, mine);
        expect(group_.all_reduce_async(tensor), sum, "all_reduce in symmetric memory");
        finish_all();
        break;
      case 3:
        tensor = tensor_of(numel, mine);
        expect(
            group_.broadcast_async(tensor, root), [=](std::int64_t i) { return value(number, root, i); }, "broadcast");
        break;
      case 4:
        tensor = at::empty({ranks_ * numel}, at::kInt);
        expect(
            group_.all_gather_into_async(tensor, input_of(numel, mine)),
            [=](std::int64_t i) { return value(number, static_cast<int>(i / numel), i % numel); }, "all_gather");
        break;
      case 5:
        tensor = at::empty({numel}, at::kInt);
        expect(
            group_.reduce_scatter_async(tensor, input_of(ranks_ * numel, mine)),
            [=, this](std::int64_t i) { return sum(me_ * numel + i); }, "reduce_scatter");
        break;
      case 6:
        tensor = at::empty({ranks_ * numel}, at::kInt);
        group_.all_to_all(tensor, tensor_of(ranks_ * numel, mine));
        expect(
            {},
            [=, this](std::int64_t i) { return value(number, static_cast<int>(i / numel), me_ * numel + i % numel); },
            "all_to_all");
        break;
      case 7: {
        // A ring of messages. No rank waits for the send, which finishes in the background.
        tensor = at::empty({numel}, at::kInt);
        (void)group_.send_async(input_of(numel, mine), next, number % 3);
        if (odd_one_out && ranks_ == 2) {
          require(group_.recv_any(tensor, number % 3) == before, "a message from another rank");
          expect(
              {}, [=](std::int64_t i) { return value(number, before, i); }, "recv_any");
        } else {
          expect(
              group_.recv_async(tensor, before, number % 3), [=](std::int64_t i) { return value(number, before, i); },
              "recv");
        }
        break;
      }
      default:
        if (odd_one_out) {
          group_.barrier();
          break;
        }
        tensor = tensor_of(numel, mine);
        group_.reduce(tensor, root);
        expect({}, me_ == root ? sum : mine, "reduce");
        break;
    }
  }

  /// Must live until no thread reads it. ThreadSanitizer does not see LibTorch's reference counts, by which the last
  /// thread that releases the tensor knows that the others have released it.
  at::Tensor input_of(std::int64_t numel, const Values& values) {
    return inputs_.emplace_back(tensor_of(numel, values));
  }

  void finish_one() {
    Expected& oldest = pending_.front();
    if (own_() % 4 == 0 && oldest.work.valid()) {
      // A thread of the engine completes the future.
      oldest.work.c10d_work()->getFuture()->wait();
    }
    oldest.work.wait();
    check(oldest.tensor, oldest.values, oldest.what);
    pending_.pop_front();
  }

  void finish_all() {
    while (!pending_.empty()) finish_one();
  }

  ProcessGroup group_;
  int ranks_, me_;
  std::mt19937 shared_, own_;
  at::Tensor symmetric_;
  std::deque<Expected> pending_;
  std::vector<at::Tensor> inputs_;
};

}  // namespace

TEST_CASE("ranks that are threads: mixed calls on 3 ranks", "[shm][threads]") {
  on_threads(3, [](ProcessGroup& group) { MixedCalls(group, 2).run(400); });
}

// Without ThreadSanitizer, random_test.cpp runs such calls on processes.
#ifdef __SANITIZE_THREAD__
TEST_CASE("ranks that are threads: mixed calls on 2 ranks", "[shm][threads]") {
  on_threads(2, [](ProcessGroup& group) { MixedCalls(group).run(400); });
}

TEST_CASE("ranks that are threads: mixed calls on 4 ranks", "[shm][threads]") {
  on_threads(4, [](ProcessGroup& group) { MixedCalls(group, 3).run(400); });
}

TEST_CASE("ranks that are threads: mixed calls on 8 ranks", "[shm][threads]") {
  on_threads(8, [](ProcessGroup& group) { MixedCalls(group, 4).run(100); });
}
#endif

TEST_CASE("ranks that are threads: many small all-reduces", "[shm][threads]") {
  // Reuses slots, tickets and headers with no other calls in between.
  on_threads(3, [](ProcessGroup& group) {
    const at::Tensor tensor = at::empty({5}, at::kInt);
    for (int number = 0; number < 1000; ++number) {
      fill(tensor, [&](std::int64_t i) { return value(number, group.rank(), i); });
      group.all_reduce(tensor);
      check(
          tensor, [&](std::int64_t i) { return value(number, 0, i) + value(number, 1, i) + value(number, 2, i); },
          "all_reduce " + std::to_string(number));
    }
  });
}

TEST_CASE("ranks that are threads: a wait in one group moves the others on", "[shm][threads]") {
  on_threads(3, [](ProcessGroup& group) {
    const std::optional<ProcessGroup> pair = group.split({2, 0});
    for (int round = 0; round < 10; ++round) {
      if (pair) MixedCalls(*pair, static_cast<unsigned>(round)).run(10);
      MixedCalls(group, static_cast<unsigned>(round)).run(10);
    }
  });
}
