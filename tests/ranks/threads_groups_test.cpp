// Ranks that are threads: creation and destruction of groups, several threads per rank, and calls that fail.
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/comm/shm_backend.h>
#include <ddpkit/error.h>

#include "ranks/thread_ranks.h"
#include "support/catch.h"

using namespace ddpkit::testing;
using ddpkit::ProcessGroup;
using ddpkit::Work;

TEST_CASE("ranks that are threads: groups come and go", "[shm][threads]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  on_threads(2, [&store](ProcessGroup& group) {
    for (int round = 0; round < 20; ++round) {
      const auto own = c10::make_intrusive<c10d::PrefixStore>(std::to_string(round), store);
      const ProcessGroup passing(ddpkit::create_shm_backend(own, group.rank(), 2, kPatience), own, at::kCPU);
      passing.barrier();
    }
  });
}

TEST_CASE("ranks that are threads: two threads of a rank call alike", "[shm][threads]") {
  // The calls match in any order; there are more calls than may be in progress.
  on_threads(3, [](ProcessGroup& group) {
    std::array<std::exception_ptr, 2> failures;
    std::vector<std::thread> threads;
    for (std::exception_ptr& failure : failures) {
      threads.emplace_back([&group, &failure] {
        try {
          std::vector<std::pair<Work, at::Tensor>> pending;
          for (int number = 0; number < 300; ++number) {
            const at::Tensor tensor = tensor_of(3, [&](std::int64_t i) { return value(0, group.rank(), i); });
            pending.emplace_back(group.all_reduce_async(tensor), tensor);
            if (group.rank() == 1 && number % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
          }
          for (auto& [work, tensor] : pending) {
            work.wait();
            check(
                tensor, [](std::int64_t i) { return value(0, 0, i) + value(0, 1, i) + value(0, 2, i); }, "all_reduce");
          }
        } catch (const std::exception& error) {
          failure = std::current_exception();
          group.abort(error.what());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& failure : failures) {
      if (failure) std::rethrow_exception(failure);
    }
  });
}

TEST_CASE("ranks that are threads: a future's callback is the last to hold the group", "[shm][threads]") {
  struct Last {
    std::optional<ProcessGroup> group;
    std::promise<void> released;
    std::promise<void> over;
    ~Last() {
      released.get_future().wait();
      group.reset();
      over.set_value();
    }
  };
  const auto store = c10::make_intrusive<c10d::HashStore>();
  on_threads(2, [&store](ProcessGroup& group) {
    for (int round = 0; round < 10; ++round) {
      const auto own = c10::make_intrusive<c10d::PrefixStore>(std::to_string(round), store);
      ProcessGroup passing(ddpkit::create_shm_backend(own, group.rank(), 2, kPatience), own, at::kCPU);
      const at::Tensor tensor = tensor_of(10, [](std::int64_t) { return 1; });
      if (group.rank() == 1) {
        group.barrier();
        passing.all_reduce(tensor);
        continue;
      }
      auto last = std::make_shared<Last>();
      std::future<void> over = last->over.get_future();
      std::promise<void>& released = last->released;
      {
        // The other rank's call completes it, so that the callback runs on the group's thread.
        Work work = passing.all_reduce_async(tensor);
        work.c10d_work()->getFuture()->addCallback([last](c10::ivalue::Future&) {});
      }
      last->group.emplace(std::move(passing));
      last.reset();
      group.barrier();
      released.set_value();
      over.wait();
    }
  });
}

TEST_CASE("ranks that are threads: calls that do not match fail everywhere", "[shm][threads]") {
  on_threads(3, [](ProcessGroup& group) {
    group.barrier();
    const at::Tensor tensor = tensor_of(group.rank() == 1 ? 20 : 10, [](std::int64_t) { return 1; });
    try {
      group.all_reduce(tensor);
    } catch (const ddpkit::CollectiveMismatch&) {
      return;
    }
    throw std::runtime_error("all_reduce of other sizes did not fail");
  });
}

TEST_CASE("ranks that are threads: one rank aborts", "[shm][threads]") {
  on_threads(3, [](ProcessGroup& group) {
    for (int number = 0; number < 10; ++number) group.barrier();
    if (group.rank() == 2) return group.abort("enough");
    try {
      group.barrier();
    } catch (const ddpkit::PeerLost& error) {
      require(std::string(error.what()).find("enough") != std::string::npos, error.what());
      return;
    }
    throw std::runtime_error("the barrier did not fail");
  });
}
