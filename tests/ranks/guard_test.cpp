// c10d's backends do not report another rank's failure; ddpkit's guard does.
#include <signal.h>
#include <sys/socket.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <ddpkit/error.h>

#include "comm/backend.h"
#include "comm/guard.h"
#include "ranks/group_of.h"
#include "support/catch.h"
#include "support/port.h"
#include "support/ranks.h"

namespace {

using ddpkit::PeerLost, ddpkit::ProcessGroup, ddpkit::Timeout;
using ddpkit::testing::group_of;
using std::chrono::milliseconds, std::chrono::steady_clock;

template <class E>
std::string guard_failure(const std::function<void()>& call, milliseconds limit, int rank) {
  const auto begin = steady_clock::now();
  try {
    call();
  } catch (const E& error) {
    CHECK(steady_clock::now() - begin < limit);
    CHECK(error.context().rank == rank);
    return error.what();
  } catch (const std::exception& error) {
    return std::string("something else: ") + error.what();
  }
  return "threw nothing";
}

ddpkit::LaunchEnvironment place_of(const ProcessGroup& group) {
  ddpkit::LaunchEnvironment environment;
  environment.rank = environment.local_rank = group.rank();
  environment.world_size = environment.local_world_size = group.world_size();
  return environment;
}

void check_rank_that_throws(const std::string& backend, const ProcessGroup& group) {
  const int last = group.world_size() - 1;
  {
    const ProcessGroup inner = group_of(backend, group, std::chrono::minutes(10));
    inner.all_reduce(torch::ones({5}));
    group.barrier();
    if (group.rank() == last) {
      inner.abort("the loss is NaN");
    } else {
      const auto message = guard_failure<PeerLost>([&] { inner.barrier(); }, std::chrono::seconds(1), last);
      CHECK(message == "rank " + std::to_string(last) + " aborted: the loss is NaN");
    }
  }
  group.barrier();
  const auto use = [&] {
    const ProcessGroup inner = group_of(backend, group, std::chrono::minutes(10));
    inner.all_reduce(torch::ones({5}));
    group.barrier();
    if (group.rank() == last) throw std::runtime_error("no such luck");
    const auto message = guard_failure<PeerLost>([&] { inner.barrier(); }, std::chrono::seconds(1), last);
    CHECK_THAT(message, ContainsSubstring("rank " + std::to_string(last)));
  };
  if (group.rank() == last) {
    CHECK_THROWS_WITH(use(), "no such luck");
  } else {
    use();
  }
  group.barrier();
}

}  // namespace

RANK_TEST("a rank that throws ends the gloo collectives of the others", "[guard]", 2, 3) {
  check_rank_that_throws("gloo", group);
}

RANK_TEST("a rank that throws ends the hierarchical collectives of the others", "[guard]", 4) {
  check_rank_that_throws("hierarchical", group);
}

RANK_TEST("a rank that is late to a gloo collective is named when the timeout ends", "[guard]", 2, 3) {
  const ProcessGroup inner = group_of("gloo", group, std::chrono::seconds(1));
  inner.all_reduce(torch::ones({5}));
  group.barrier();
  if (group.rank() != 1) {
    const auto message = guard_failure<Timeout>([&] { inner.all_reduce(torch::ones({5})); }, milliseconds(1700), 1);
    CHECK_THAT(message, ContainsSubstring(" timed out after 1.0 s in all_reduce number 1 (20 bytes, group ") &&
                            ContainsSubstring("waiting for rank 1, which is in no collective; its last one was "
                                              "all_reduce number 0 (20 bytes, group "));
  }
  group.barrier();
  CHECK_THROWS_AS(inner.barrier(), Timeout);
}

RANK_TEST("a rank that leaves a gloo group is named to those that call one more collective", "[guard]", 2, 3) {
  for (const int leaver : {1, 0}) {
    std::optional<ProcessGroup> inner = group_of("gloo", group, std::chrono::minutes(10));
    inner->all_reduce(torch::ones({5}));
    group.barrier();
    if (group.rank() == leaver) {
      inner.reset();
    } else {
      const auto message =
          guard_failure<PeerLost>([&] { inner->all_reduce(torch::ones({5})); }, std::chrono::seconds(1), leaver);
      CHECK_THAT(message, ContainsSubstring(") has left the group; rank ") &&
                              ContainsSubstring("all_reduce number 1 (20 bytes, group "));
    }
    group.barrier();
  }
}

TEST_CASE("a rank that is killed ends the gloo collectives of the others", "[ranks][guard]") {
  const auto body = [](ProcessGroup& group) {
    const ProcessGroup inner = group_of("gloo", group, std::chrono::minutes(10));
    inner.barrier();
    group.barrier();  // Otherwise the death may interrupt the first barrier.
    if (group.rank() == 1) ::raise(SIGKILL);
    const auto message = guard_failure<PeerLost>([&] { inner.barrier(); }, std::chrono::seconds(1), 1);
    CHECK_THAT(message, ContainsSubstring("rank 1 (pid ") && ContainsSubstring("has ended"));
  };
  ddpkit::testing::on_ranks("a rank that is killed ends the gloo collectives of the others", 3, body, {.doomed = {1}});
}

RANK_TEST("a rank that throws ends the gloo collectives of the others while other threads connect", "[guard]", 3) {
  // The process has more new connections than those of gloo.
  std::atomic<bool> connected = false;
  std::vector<int> ends;
  std::thread other([&] {
    const ddpkit::testing::TakenPort port;
    while (!connected) {
      for (const int fd : port.connect()) ends.push_back(fd);
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  {
    const ProcessGroup inner = group_of("gloo", group, std::chrono::minutes(10));
    connected = true;
    other.join();
    inner.barrier();
    if (group.rank() == 1) {
      group.barrier();
      inner.abort("the loss is NaN");
    } else {
      ddpkit::Work work = inner.all_reduce_async(torch::ones({5}));
      group.barrier();
      CHECK_THROWS_AS(work.wait(), PeerLost);
    }
    group.barrier();  // Rank 1 keeps its connections until then.
  }
  REQUIRE(ends.size() >= 2);
  for (std::size_t i = 0; i < ends.size(); i += 2) {
    char byte = 'x';
    CHECK(::send(ends[i], &byte, 1, 0) == 1);
    CHECK(::recv(ends[i + 1], &byte, 1, 0) == 1);
    CHECK(::send(ends[i + 1], &byte, 1, 0) == 1);
    CHECK(::recv(ends[i], &byte, 1, 0) == 1);
    ::close(ends[i]);
    ::close(ends[i + 1]);
  }
}

RANK_TEST("a rank that is missing when gloo connects is named when the timeout ends", "[guard]", 2, 3) {
  constexpr std::chrono::seconds kTimeout(2);
  const auto store = c10::make_intrusive<c10d::PrefixStore>("missing", group.store());
  const ddpkit::LaunchEnvironment environment = place_of(group);
  if (group.rank() == 1) {
    // The rank comes, and does not connect.
    const ddpkit::GroupGuard guard(store, environment, kTimeout, /*name=*/1);
    group.barrier();
  } else {
    CHECK_THROWS_WITH(
        ddpkit::create_gloo_backend(store, environment, kTimeout),
        ContainsSubstring("rank 1 of " + std::to_string(group.world_size()) + " did not come within 2.0 s"));
    group.barrier();
  }
}

RANK_TEST("a call of a lost device is an error on all ranks", "[guard]", 2, 3) {
  const auto store = c10::make_intrusive<c10d::PrefixStore>("lost device", group.store());
  ddpkit::GroupGuard guard(store, place_of(group), std::chrono::minutes(10), group.rank());
  guard.start({.abort = [] {}});
  if (group.rank() == 1) {
    ddpkit::Event call{.kind = ddpkit::EventKind::kAllReduce};
    const std::uint64_t index = ddpkit::EventRing::of_process().begin(call);
    guard.watch(index, call, []() -> bool { throw std::runtime_error("the device is lost\nand more"); });
  }
  const std::chrono::seconds limit(100);
  CHECK(guard_failure<PeerLost>([&] { guard.throw_failure(limit); }, limit, 1) == "rank 1 aborted: the device is lost");
  group.barrier();
}

RANK_TEST("a rank that leaves before its guard has seen the others is no failure", "[guard]", 2, 3) {
  const auto store = c10::make_intrusive<c10d::PrefixStore>("leaves at once", group.store());
  // The guard of rank 0 has no thread, so it accepts no connection before its end.
  std::optional<ddpkit::GroupGuard> guard(std::in_place, store, place_of(group), std::chrono::minutes(10),
                                          group.rank());
  if (group.rank() != 0) guard->start({.abort = [] {}});
  group.barrier();
  if (group.rank() == 0) guard.reset();
  group.barrier();
  std::this_thread::sleep_for(milliseconds(300));
  if (guard) CHECK_NOTHROW(guard->throw_failure());
  group.barrier();
}

RANK_TEST("a rank that fails before its guard has seen the others is named", "[guard]", 2, 3) {
  const auto store = c10::make_intrusive<c10d::PrefixStore>("fails at once", group.store());
  ddpkit::GroupGuard guard(store, place_of(group), std::chrono::minutes(10), group.rank());
  if (group.rank() != 0) guard.start({.abort = [] {}});
  group.barrier();
  if (group.rank() == 0) {
    guard.abort("the loss is NaN");
    guard.stop();
  } else {
    const std::chrono::seconds limit(100);
    CHECK(guard_failure<PeerLost>([&] { guard.throw_failure(limit); }, limit, 0) == "rank 0 aborted: the loss is NaN");
  }
  group.barrier();
}

TEST_CASE("a killed rank is detected while another process holds its connections", "[ranks][guard]") {
  // As long as the kernel frees the memory of a large process, its connections stay open too.
  const auto body = [](ProcessGroup& group) {
    const ProcessGroup inner = group_of("gloo", group, std::chrono::minutes(10));
    inner.barrier();
    if (group.rank() == 1) {
      if (::fork() == 0) {
        for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::close(fd);
        ::alarm(30);
        ::pause();
      }
      ::raise(SIGKILL);
    }
    const auto message = guard_failure<PeerLost>([&] { inner.barrier(); }, std::chrono::seconds(10), 1);
    CHECK_THAT(message, ContainsSubstring("rank 1 (pid ") && ContainsSubstring("has ended"));
  };
  ddpkit::testing::on_ranks("a killed rank is detected while another process holds its connections", 3, body,
                            {.doomed = {1}});
}

TEST_CASE("a rank that is killed while gloo sends to it is named to the sender", "[ranks][guard]") {
  // gloo ends the wait for such a send only at the timeout.
  const std::string name = "a rank that is killed while gloo sends to it is named to the sender";
  for (const bool is_message : {false, true}) {
    const auto body = [&](ProcessGroup& group) {
      const ProcessGroup inner = group_of("gloo", group, std::chrono::minutes(1));
      inner.barrier();
      std::thread killer;
      if (group.rank() == 1)
        killer = std::thread([] {
          std::this_thread::sleep_for(milliseconds(300));
          ::raise(SIGKILL);
        });
      const torch::Tensor large = torch::ones({16 << 20});
      const auto use = [&] {
        for (;;) {
          if (!is_message) {
            inner.broadcast(large, 0);
          } else if (group.rank() == 0) {
            inner.send(large, 1);
          } else {
            inner.recv(large, 0);
          }
        }
      };
      const auto message = guard_failure<PeerLost>(use, std::chrono::seconds(30), 1);
      CHECK_THAT(message, ContainsSubstring("rank 1 (pid ") && ContainsSubstring("has ended"));
    };
    CAPTURE(is_message);
    ddpkit::testing::on_ranks(name, is_message ? 2 : 3, body, {.doomed = {1}});
  }
}
