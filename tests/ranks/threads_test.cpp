// Ranks that are threads of this process. They map the shared memory at one address, so that ThreadSanitizer sees both
// ends of every exchange, which it cannot where ranks are processes. The data is written and checked in loops of this
// file: what LibTorch's own operators do would be hidden from it.
#include <ATen/ops/empty.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddpkit/comm/error.h>
#include <ddpkit/comm/process_group.h>
#include <ddpkit/comm/shm_backend.h>

#include "comm/arena.h"
#include "comm/backends.h"
#include "support/catch.h"

using ddpkit::ProcessGroup;
using ddpkit::ReduceOp;
using ddpkit::Work;

namespace {

constexpr std::chrono::seconds kPatience(120);

/// Runs `body` on `ranks` threads, each a rank of one group; rethrows what the first of them threw. Catch2's assertions
/// are for one thread only: bodies call require().
void on_threads(int ranks, const std::function<void(ProcessGroup&)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      std::optional<ProcessGroup> group;
      try {
        group.emplace(ddpkit::create_shm_backend(store, rank, ranks, kPatience), store, at::kCPU);
        body(*group);
      } catch (const std::exception& error) {
        failures[static_cast<std::size_t>(rank)] = std::current_exception();
        if (group) group->abort(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

/// Element i of what rank `rank` brings to call `number`.
std::int32_t value(int number, int rank, std::int64_t i) {
  return static_cast<std::int32_t>((number * 7 + rank * 13 + i) % 1000);
}

using Values = std::function<std::int32_t(std::int64_t)>;

void fill(const at::Tensor& tensor, const Values& values) {
  auto* data = tensor.mutable_data_ptr<std::int32_t>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) data[i] = values(i);
}

void check(const at::Tensor& tensor, const Values& values, const std::string& what) {
  const auto* data = tensor.const_data_ptr<std::int32_t>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    if (data[i] == values(i)) continue;
    throw std::runtime_error(what + ": element " + std::to_string(i) + " is " + std::to_string(data[i]) + ", not " +
                             std::to_string(values(i)));
  }
}

at::Tensor tensor_of(std::int64_t numel, const Values& values) {
  at::Tensor tensor = at::empty({numel}, at::kInt);
  fill(tensor, values);
  return tensor;
}

ddpkit::OwnBackend& own_backend(const ProcessGroup& group) {
  auto* own = dynamic_cast<ddpkit::OwnBackend*>(group.backend().get());
  require(own != nullptr, "the shm backend is ddpkit's own");
  return *own;
}

/// Calls of random kinds and sizes on one group, each rank waiting at times of its own.
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
        // In symmetric memory; now and then one rank alone brings its own.
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
        // A ring of messages. Nobody waits for the send: it finishes in the background.
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

  /// Lives until no thread reads it any more: ThreadSanitizer does not see the reference counts inside LibTorch by
  /// which the last one to let go of it would know that the others have.
  at::Tensor input_of(std::int64_t numel, const Values& values) {
    return inputs_.emplace_back(tensor_of(numel, values));
  }

  void finish_one() {
    Expected& oldest = pending_.front();
    if (own_() % 4 == 0 && oldest.work.valid()) {
      // The future completes in a thread of the engine's.
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

TEST_CASE("ranks that are threads: mixed calls on 2 ranks", "[shm][threads]") {
  on_threads(2, [](ProcessGroup& group) { MixedCalls(group).run(400); });
}

TEST_CASE("ranks that are threads: mixed calls on 3 ranks", "[shm][threads]") {
  on_threads(3, [](ProcessGroup& group) { MixedCalls(group, 2).run(400); });
}

TEST_CASE("ranks that are threads: mixed calls on 4 ranks", "[shm][threads]") {
  on_threads(4, [](ProcessGroup& group) { MixedCalls(group, 3).run(400); });
}

TEST_CASE("ranks that are threads: mixed calls on 8 ranks", "[shm][threads]") {
  on_threads(8, [](ProcessGroup& group) { MixedCalls(group, 4).run(100); });
}

TEST_CASE("ranks that are threads: many small all-reduces", "[shm][threads]") {
  // Slots, tickets and headers are used again and again with nothing else in between.
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

namespace {

/// Tensors that all ranks reduce where they stand: of one size everywhere, but each rank's at places of its own.
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
  ddpkit::OwnBackend& backend = own_backend(group);
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
    // A tensor of private memory, which is staged, comes between.
    const bool staged = shared() % 4 == 0;
    constexpr std::int64_t kSizes[] = {1, 16, 17, 1000, 1024, 20000};
    std::vector<std::int64_t> sizes(shared() % 10 == 0 ? 70 : 1 + shared() % 5);  // At most 64 go into one collective.
    for (std::int64_t& size : sizes) size = kSizes[shared() % (sizes.size() > 5 ? 3 : 5)];
    if (shared() % 3 == 0) sizes[0] = kSizes[5];
    // With at most two under way a third of the memory is free; which third differs between the ranks.
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
                       : Work(backend.all_reduce_in_place(tensors, c10d::ReduceOp(c10d::ReduceOp::SUM)));
    pending.push_back({std::move(work), std::move(tensors), number});
  }
  while (!pending.empty()) finish_one();
}

}  // namespace

TEST_CASE("ranks that are threads: tensors reduced where they stand", "[shm][threads]") {
  for (const int ranks : {2, 3, 4}) on_threads(ranks, reduce_in_place);
}

TEST_CASE("ranks that are threads: tensors of an arena", "[shm][threads]") {
  REQUIRE_FALSE(ddpkit::ArenaLease::taken());
  on_threads(2, [](ProcessGroup& group) {
    const int me = group.rank();
    std::mt19937 own(static_cast<unsigned>(me));
    constexpr std::int64_t kNumel = 5000;
    std::vector<at::Tensor> outlives;
    for (int round = 0; round < 5; ++round) {
      // Each rank has one of its own, and LibTorch's tensors come from the one that was opened last.
      auto lease = own_backend(group).open_arena(std::size_t{4} << 20, std::size_t{1} << 20);
      require(lease != nullptr, "an arena");
      require(lease == own_backend(group).open_arena(1, 0), "the arena there is");
      for (int number = 0; number < 40; ++number) {
        std::vector<at::Tensor> tensors, others;
        for (int i = 0; i < 3; ++i) {
          others.push_back(at::empty({kNumel + static_cast<std::int64_t>(own() % 100)}, at::kInt));
          tensors.push_back(lease->empty(kNumel + i, at::kInt));
          fill(tensors.back(), [&](std::int64_t k) { return value(number + i, me, k); });
          fill(others.back(), [&](std::int64_t) { return me; });
        }
        Work work(own_backend(group).all_reduce_in_place(tensors, c10d::ReduceOp(c10d::ReduceOp::SUM)));
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
      outlives.push_back(lease->empty(kNumel, at::kInt));
      fill(outlives.back(), [&](std::int64_t) { return round; });
      group.barrier();  // Else one of them might find the other's arena in force when it opens the next.
      lease.reset();
      group.barrier();
      check(
          outlives.back(), [&](std::int64_t) { return round; }, "a tensor that outlives its arena");
    }
  });
  CHECK_FALSE(ddpkit::ArenaLease::taken());
}

TEST_CASE("ranks that are threads: a child process of one with an arena", "[shm][threads]") {
  on_threads(2, [](ProcessGroup& group) {
    const auto lease = own_backend(group).open_arena(std::size_t{4} << 20, std::size_t{1} << 20);
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
  // From the fifth chunk of 64 KiB on, each is copied in while an earlier one is reduced, but for the last.
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

TEST_CASE("ranks that are threads: a wait in one group moves the others on", "[shm][threads]") {
  on_threads(3, [](ProcessGroup& group) {
    const std::optional<ProcessGroup> pair = group.split({2, 0});
    for (int round = 0; round < 10; ++round) {
      if (pair) MixedCalls(*pair, static_cast<unsigned>(round)).run(10);
      MixedCalls(group, static_cast<unsigned>(round)).run(10);
    }
  });
}

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
  // In whatever order they come, the calls match; there are more of them than may be under way.
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
    std::promise<void> let_go;
    std::promise<void> over;
    ~Last() {
      let_go.get_future().wait();
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
      std::promise<void>& let_go = last->let_go;
      {
        // It is complete when the other rank has come, so that the callback runs on the group's thread.
        Work work = passing.all_reduce_async(tensor);
        work.c10d_work()->getFuture()->addCallback([last](c10::ivalue::Future&) {});
      }
      last->group.emplace(std::move(passing));
      last.reset();
      group.barrier();
      let_go.set_value();
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

TEST_CASE("ranks that are threads: one gives up", "[shm][threads]") {
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
