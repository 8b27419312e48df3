// Collectives of device tensors that are staged through the host. A thread simulates the device: float tensors are on
// the device, others on the host. Every copy is delayed, so that a wrong order fails the test.
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <mutex>
#include <thread>

#include <ddpkit/comm/shm_backend.h>
#include <ddpkit/comm/trace.h>
#include <ddpkit/error.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/backends/staged_backend.h"
#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"

namespace {

class ThreadQueue final : public ddpkit::StagingQueue {
 public:
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = true;
    std::atomic<bool> broken = false;  ///< Copies throw.
    void set(bool value) {
      {
        const std::lock_guard lock(mutex);
        open = value;
      }
      changed.notify_all();
    }
    void pass() {
      std::unique_lock lock(mutex);
      changed.wait(lock, [this] { return open; });
    }
  };

  explicit ThreadQueue(std::shared_ptr<Gate> gate) : gate_(std::move(gate)), thread_([this] { loop(); }) {}
  ~ThreadQueue() override {
    push(nullptr);
    thread_.join();
  }

  bool owns(const at::Tensor& tensor) const override { return tensor.scalar_type() == at::kFloat; }
  at::Tensor host_memory(at::IntArrayRef sizes, at::ScalarType dtype) override {
    return at::full(sizes, 1e9, at::TensorOptions(dtype));
  }
  // The host is the caller's stream here: earlier work has finished.
  std::shared_ptr<Mark> mark_caller() override { return nullptr; }
  std::shared_ptr<Mark> copy(const Copies& copies, const Mark* /*after*/) override {
    if (gate_->broken) throw std::runtime_error("the copy failed");
    push([copies] {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      const at::NoGradGuard no_grad;
      for (const auto& [to, from] : copies) to.copy_(from);
    });
    auto place = std::make_shared<Place>();
    push([place] { place->gate.set(true); });
    return place;
  }

 private:
  struct Place final : Mark {
    Gate gate;
    Place() { gate.open = false; }
    void block_current_stream() override { gate.pass(); }
    bool query() override {
      const std::lock_guard lock(gate.mutex);
      return gate.open;
    }
  };

  void push(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      work_.push_back(std::move(work));
    }
    changed_.notify_one();
  }
  void loop() {
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !work_.empty(); });
      const auto work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      if (!work) return;
      gate_->pass();
      work();
    }
  }

  std::shared_ptr<Gate> gate_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  std::thread thread_;
};

struct Staged {
  std::shared_ptr<ThreadQueue::Gate> gate = std::make_shared<ThreadQueue::Gate>();
  ddpkit::ProcessGroup group;

  explicit Staged(const ddpkit::ProcessGroup& ranks) : group(make(ranks)) {}
  ddpkit::ProcessGroup make(const ddpkit::ProcessGroup& ranks) const {
    static int number = 0;
    const std::string name = std::to_string(number++);
    const auto host = ddpkit::testing::another_group(ranks, "host-" + name),
               staged = ddpkit::testing::another_group(ranks, "staged-" + name);
    return ddpkit::ProcessGroup(
        c10::make_intrusive<ddpkit::StagedBackend>(ddpkit::Backend::of(host), ddpkit::Backend::of(staged),
                                                   std::make_unique<ThreadQueue>(gate), at::kCPU),
        ranks.store(), at::kCPU);
  }
};

torch::Tensor of_rank(int rank, std::int64_t numel) { return torch::arange(numel, torch::kFloat) + 100 * rank; }

}  // namespace

RANK_TEST("staged collectives give what the host's give", "[staged]", 1, 2, 3) {
  const Staged staged(group);
  const int ranks = group.world_size(), rank = group.rank();
  const ddpkit::ProcessGroup &device = staged.group, &host = group;
  for (const auto op : {ddpkit::ReduceOp::kSum, ddpkit::ReduceOp::kAvg, ddpkit::ReduceOp::kMax}) {
    auto ours = of_rank(rank, 1000), theirs = of_rank(rank, 1000);
    device.all_reduce(ours, op);
    host.all_reduce(theirs, op);
    CHECK(torch::equal(ours, theirs));
    auto part = torch::zeros({4}), reference = torch::zeros({4});
    device.reduce_scatter(part, of_rank(rank, 4 * ranks), op);
    host.reduce_scatter(reference, of_rank(rank, 4 * ranks), op);
    CHECK(torch::equal(part, reference));
    auto at_root = of_rank(rank, 9), reference_at_root = of_rank(rank, 9);
    device.reduce(at_root, ranks - 1, op);
    host.reduce(reference_at_root, ranks - 1, op);
    CHECK(torch::equal(at_root, reference_at_root));
  }
  auto ours = of_rank(rank, 7);
  device.broadcast(ours, ranks - 1);
  CHECK(torch::equal(ours, of_rank(ranks - 1, 7)));
  CHECK(torch::equal(device.all_gather(of_rank(rank, 5)), host.all_gather(of_rank(rank, 5))));
  const auto gathered = device.gather(of_rank(rank, 5), 0);
  CHECK(gathered.defined() == (rank == 0));
  if (rank == 0) CHECK(torch::equal(gathered[ranks - 1], of_rank(ranks - 1, 5)));
  auto mine = torch::zeros({3});
  device.scatter(mine, rank == 0 ? of_rank(0, 3 * ranks).view({ranks, 3}) : torch::Tensor(), 0);
  CHECK(torch::equal(mine, torch::arange(3, torch::kFloat) + 3 * rank));
  auto exchanged = torch::zeros({2 * ranks}), reference = torch::zeros({2 * ranks});
  device.all_to_all(exchanged, of_rank(rank, 2 * ranks));
  host.all_to_all(reference, of_rank(rank, 2 * ranks));
  CHECK(torch::equal(exchanged, reference));
  // Transposed tensors: no copy is contiguous.
  auto transposed = of_rank(rank, 6).view({2, 3}).t();
  device.all_reduce(transposed);
  CHECK(torch::equal(transposed, (of_rank(0, 6) * ranks + 50 * ranks * (ranks - 1)).view({2, 3}).t()));
  // Host tensors and byte tensors do not use the device's queue.
  auto on_host = torch::full({3}, rank, torch::kLong);
  device.all_reduce(on_host, ddpkit::ReduceOp::kMax);
  CHECK(on_host[0].item<int>() == ranks - 1);
  CHECK(device.all_gather_bytes(std::string(static_cast<std::size_t>(rank), 'x')).back().size() ==
        static_cast<std::size_t>(ranks - 1));
  device.barrier();
}

RANK_TEST("a timeline is written where shm serves a device", "[staged][timeline]", 2) {
  const Staged staged(group);
  // A timeline must not use device memory: a collective cannot read this device's memory.
  const ddpkit::ProcessGroup device(staged.group.backend(), group.store(), torch::Device(torch::kMeta));
  const ddpkit::testing::Folder folder;
  const std::string path = folder / "timeline.json";
  ddpkit::Timeline timeline(device, path);
  { const auto span = timeline.span("work"); }
  timeline.write();
  if (group.rank() == 0) CHECK(std::filesystem::file_size(path) > 0);
  group.barrier();
}

RANK_TEST("the host continues while a staged collective waits in its queue", "[staged]", 2) {
  Staged staged(group);
  std::vector<torch::Tensor> tensors;
  std::vector<ddpkit::Work> works;
  staged.gate->set(false);
  for (int i = 0; i < 5; ++i) {
    tensors.push_back(torch::full({100}, 10.F * i + group.rank()));
    works.push_back(staged.group.all_reduce_async(tensors.back()));
  }
  // Host tensors have a separate group, which does not wait for the queue.
  staged.group.barrier();
  for (ddpkit::Work& work : works) CHECK_FALSE(work.is_completed());
  for (int i = 0; i < 5; ++i) CHECK(tensors[i][0].item<float>() == 10.F * i + group.rank());
  staged.gate->set(true);
  for (int i = 0; i < 5; ++i) {
    works[i].wait();
    CHECK((tensors[i] == 20.F * i + 1).all().item<bool>());
    CHECK(works[i].is_completed());
  }
}

RANK_TEST("what a staged collective fails with comes out of a later call on every rank", "[staged]", 2) {
  Staged staged(group);
  auto tensor = torch::ones({group.rank() == 0 ? 10 : 11});
  const auto use = [&] {
    for (int i = 0; i < 1000; ++i) {
      ddpkit::Work work = staged.group.all_reduce_async(tensor);
      work.wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  CHECK_THROWS_AS(use(), ddpkit::Error);
  CHECK((tensor == 1).all().item<bool>());  // Of the failed collective.
  // Later calls fail too.
  CHECK_THROWS_AS(staged.group.broadcast(torch::zeros({1})), ddpkit::Error);
}

RANK_TEST("c10d's synchronize() of a staged collective waits for its result", "[staged]", 2) {
  Staged staged(group);
  std::vector<torch::Tensor> tensors = {torch::full({100}, group.rank() + 1.F)};
  ddpkit::Backend::of(staged.group)->allreduce(tensors, {})->synchronize();
  CHECK((tensors[0] == 3).all().item<bool>());
}

RANK_TEST("a copy that fails on one rank ends the staged collectives of all ranks", "[staged]", 2) {
  Staged staged(group);
  if (group.rank() == 1) staged.gate->broken = true;
  CHECK_THROWS_WITH(staged.group.all_reduce(torch::ones({10})), ContainsSubstring("the copy failed"));
  CHECK_THROWS_WITH(staged.group.all_reduce(torch::ones({10})), ContainsSubstring("the copy failed"));
  group.barrier();
}

RANK_TEST("a rank that aborts ends the staged collectives of the other ranks", "[staged]", 2) {
  Staged staged(group);
  if (group.rank() == 0) {
    staged.group.abort("out of patience");
  } else {
    ddpkit::Work work = staged.group.all_reduce_async(torch::zeros({10}));
    while (!work.is_completed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK_THROWS_WITH(work.wait(), ContainsSubstring("out of patience"));
  }
  group.barrier();
}

RANK_TEST("staged messages, and tensors of both kinds in one call, are refused", "[staged]", 2) {
  const Staged staged(group);
  CHECK_THROWS_WITH(staged.group.send(torch::zeros({1}), 1 - group.rank()), ContainsSubstring("move it to the CPU"));
  CHECK_THROWS_AS(staged.group.reduce_scatter(torch::zeros({1}), torch::zeros({2}, torch::kLong)),
                  ddpkit::InvalidArgument);
  // No collective has been started.
  staged.group.all_reduce(torch::zeros({1}));
}

RANK_TEST("shutdown waits for the queued staged collectives", "[staged][shutdown]", 1, 2) {
  Staged staged(group);
  auto tensor = torch::full({100}, group.rank() + 1.F);
  staged.gate->set(false);
  ddpkit::Work work = staged.group.all_reduce_async(tensor);
  std::atomic<bool> opened = false;
  std::thread opens([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    opened = true;
    staged.gate->set(true);
  });
  CHECK(staged.group.shutdown());
  CHECK(opened);
  opens.join();
  CHECK((tensor == (group.world_size() == 1 ? 1 : 3)).all().item<bool>());
  CHECK_THROWS_WITH(staged.group.all_reduce(tensor), ContainsSubstring("the process group was shut down"));

  Staged blocked(group);
  blocked.gate->set(false);
  work = blocked.group.all_reduce_async(tensor);
  CHECK_FALSE(blocked.group.shutdown(std::chrono::milliseconds(100)));
  CHECK_THROWS_WITH(blocked.group.barrier(), ContainsSubstring("has not ended within 100 ms"));
  blocked.gate->set(true);
  group.barrier();
}
