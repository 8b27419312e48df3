#include <torch/torch.h>

#include <optional>
#include <thread>

#include <ddpkit/error.h>

#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::ProcessGroup;

namespace {

torch::Tensor numbers(std::int64_t numel, int from) { return torch::arange(numel, at::kFloat) + from * 1000; }

}  // namespace

RANK_TEST("messages of every size arrive", "[shm][messages]", 2, 3) {
  const int next = (group.rank() + 1) % group.world_size();
  const int before = (group.rank() + group.world_size() - 1) % group.world_size();
  for (const std::int64_t numel : {0, 1, 1000, 65536, 65537, 1000000}) {
    // All ranks send around the ring first: no send may wait for its receiver.
    const torch::Tensor mine = numbers(numel, group.rank());
    ddpkit::Work sent = group.send_async(mine, next);
    torch::Tensor theirs = torch::full({numel}, -1.0f);
    group.recv(theirs, before);
    sent.wait();
    CHECK(torch::equal(theirs, numbers(numel, before)));
  }
}

RANK_TEST("messages with one tag keep their order, other tags may overtake", "[shm][messages]", 2) {
  if (group.rank() == 0) {
    for (int i = 0; i < 20; ++i) group.send(numbers(10, i), 1, i % 2);
  } else {
    torch::Tensor tensor = torch::empty({10});
    for (int i = 1; i < 20; i += 2) {
      group.recv(tensor, 0, 1);
      CHECK(torch::equal(tensor, numbers(10, i)));
    }
    for (int i = 0; i < 20; i += 2) {
      group.recv(tensor, 0, 0);
      CHECK(torch::equal(tensor, numbers(10, i)));
    }
  }
}

RANK_TEST("a large message may be overtaken by another tag", "[shm][messages]", 2) {
  if (group.rank() == 0) {
    ddpkit::Work large = group.send_async(numbers(1000000, 1), 1, 1);
    ddpkit::Work small = group.send_async(numbers(10, 2), 1, 2);
    small.wait();
    large.wait();
  } else {
    torch::Tensor small = torch::empty({10}), large = torch::empty({1000000});
    group.recv(small, 0, 2);
    group.recv(large, 0, 1);
    CHECK(torch::equal(small, numbers(10, 2)));
    CHECK(torch::equal(large, numbers(1000000, 1)));
  }
}

RANK_TEST("a send without a wait still arrives", "[shm][messages]", 2) {
  if (group.rank() == 0) {
    (void)group.send_async(numbers(1000000, 3), 1);  // Larger than any buffer.
    // This rank does not call the group while the other rank receives.
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  } else {
    torch::Tensor tensor = torch::empty({1000000});
    group.recv(tensor, 0);
    CHECK(torch::equal(tensor, numbers(1000000, 3)));
  }
  group.barrier();
}

RANK_TEST("a receive from any rank returns the sender", "[shm][messages]", 3) {
  if (group.rank() == 0) {
    std::vector<int> sources;
    for (int i = 0; i < 4; ++i) {
      torch::Tensor tensor = torch::empty({100});
      const int source = group.recv_any(tensor, 7);
      CHECK(torch::equal(tensor, numbers(100, source)));
      sources.push_back(source);
    }
    CHECK(std::count(sources.begin(), sources.end(), 1) == 2);
    CHECK(std::count(sources.begin(), sources.end(), 2) == 2);
  } else {
    for (int i = 0; i < 2; ++i) group.send(numbers(100, group.rank()), 0, 7);
  }
}

RANK_TEST("messages and collectives do not get in each other's way", "[shm][messages]", 2) {
  const int other = 1 - group.rank();
  for (int round = 0; round < 50; ++round) {
    torch::Tensor received = torch::empty({50000});
    ddpkit::Work receive = group.recv_async(received, other, round);
    torch::Tensor sum = torch::ones({100000});
    ddpkit::Work reduce = group.all_reduce_async(sum);
    ddpkit::Work send = group.send_async(numbers(50000, group.rank()), other, round);
    receive.wait();
    reduce.wait();
    send.wait();
    CHECK(torch::equal(received, numbers(50000, other)));
    CHECK((sum == 2).all().item<bool>());
  }
}

RANK_TEST("a message of another size is a mismatch that names both", "[shm][messages][errors]", 2) {
  std::string message;
  try {
    if (group.rank() == 0) {
      group.send(torch::zeros({10}), 1, 5);
      group.barrier();
    } else {
      torch::Tensor tensor = torch::zeros({11});
      group.recv(tensor, 0, 5);
    }
  } catch (const ddpkit::CollectiveMismatch& error) {
    message = error.what();
  }
  CHECK_THAT(message, ContainsSubstring("rank 0 sent 10 float32 (tag 5) to rank 1, which called recv of 11 float32"));
}

RANK_TEST("a message from a rank that has left, but was sent before, arrives", "[shm][messages]", 2) {
  std::optional<ProcessGroup> inner = ddpkit::testing::another_group(group, "inner");
  if (group.rank() == 0) {
    inner->send(numbers(1000, 1), 1);
    inner.reset();
    group.barrier();
  } else {
    group.barrier();
    torch::Tensor tensor = torch::empty({1000});
    inner->recv(tensor, 0);
    CHECK(torch::equal(tensor, numbers(1000, 1)));
    CHECK_THROWS_AS(inner->recv(tensor, 0), ddpkit::PeerLost);
  }
  group.barrier();
}

RANK_TEST("wrong peers and tags are refused", "[shm][messages][errors]", 2) {
  torch::Tensor tensor = torch::zeros({1});
  CHECK_THROWS_AS(group.send(tensor, group.rank()), ddpkit::InvalidArgument);
  CHECK_THROWS_AS(group.send(tensor, 2), ddpkit::InvalidArgument);
  CHECK_THROWS_AS(group.recv(tensor, -2), ddpkit::InvalidArgument);
  CHECK_THROWS_AS(group.send(tensor, 1 - group.rank(), -1), ddpkit::InvalidArgument);
}
