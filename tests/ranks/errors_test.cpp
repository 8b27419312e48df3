#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "parallel/model_agreement.h"
#include "ranks/thread_ranks.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::CollectiveMismatch;
using ddpkit::PeerLost;
using ddpkit::ProcessGroup;
using ddpkit::ReduceOp;
using ddpkit::Timeout;
using ddpkit::testing::another_group;

namespace {

template <class E>
E caught(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error;
  } catch (const std::exception& error) {
    FAIL("threw something else: " << error.what());
  }
  FAIL("threw nothing");
  throw std::logic_error("not reached");
}

}  // namespace

RANK_TEST("ranks that call different collectives all learn who called what", "[shm][errors]", 2, 3) {
  torch::Tensor tensor = torch::zeros({10});
  const auto error = caught<CollectiveMismatch>([&] {
    if (group.rank() == 1) {
      group.broadcast(tensor, 1);
    } else {
      group.all_reduce(tensor);
    }
  });
  CHECK_THAT(error.what(), ContainsSubstring("rank 1 called broadcast of 10 float32 from rank 1"));
  CHECK_THAT(error.what(), ContainsSubstring("called all_reduce(sum) of 10 float32"));
  // The group has failed; later calls report the first cause.
  CHECK(std::string(caught<CollectiveMismatch>([&] { group.barrier(); }).what()) == error.what());
}

namespace {

/// A call in which one rank, the odd rank, passes another argument than the others.
struct OddCall {
  std::string argument;
  std::function<void(const ProcessGroup& group, bool odd)> call;
};

std::vector<OddCall> odd_calls() {
  std::vector<OddCall> calls;
  const auto add = [&](std::string argument, std::function<void(const ProcessGroup&, bool)> call) {
    calls.push_back({std::move(argument), std::move(call)});
  };
  const auto ones = [](std::int64_t size, at::ScalarType dtype = at::kFloat) { return torch::ones({size}, dtype); };
  const auto op = [](bool odd) { return odd ? ReduceOp::kMax : ReduceOp::kSum; };
  const auto size = [](bool odd) { return odd ? 11 : 10; };
  // int32 has as many bytes as float32.
  const auto dtype = [](bool odd) { return odd ? at::kInt : at::kFloat; };

  add("broadcast's root", [=](const ProcessGroup& group, bool odd) { group.broadcast(ones(10), odd ? 1 : 0); });
  add("broadcast's size", [=](const ProcessGroup& group, bool odd) { group.broadcast(ones(size(odd)), 1); });
  add("broadcast's type", [=](const ProcessGroup& group, bool odd) { group.broadcast(ones(10, dtype(odd))); });
  add("reduce's root", [=](const ProcessGroup& group, bool odd) { group.reduce(ones(10), odd ? 1 : 0); });
  add("reduce's reduction", [=](const ProcessGroup& group, bool odd) { group.reduce(ones(10), 1, op(odd)); });
  add("reduce's size", [=](const ProcessGroup& group, bool odd) { group.reduce(ones(size(odd)), 1); });
  add("gather's root", [=](const ProcessGroup& group, bool odd) { (void)group.gather(ones(10), odd ? 1 : 0); });
  add("gather's size", [=](const ProcessGroup& group, bool odd) { (void)group.gather(ones(size(odd))); });
  add("scatter's root", [=](const ProcessGroup& group, bool odd) {
    group.scatter(ones(10), torch::ones({group.world_size(), 10}), odd ? 1 : 0);
  });
  add("scatter's size", [=](const ProcessGroup& group, bool odd) {
    group.scatter(ones(size(odd)), torch::ones({group.world_size(), size(odd)}));
  });
  add("all_reduce's reduction", [=](const ProcessGroup& group, bool odd) { group.all_reduce(ones(10), op(odd)); });
  add("all_reduce's size", [=](const ProcessGroup& group, bool odd) { group.all_reduce(ones(size(odd))); });
  add("all_reduce's type", [=](const ProcessGroup& group, bool odd) { group.all_reduce(ones(10, dtype(odd))); });
  add("all_gather's size", [=](const ProcessGroup& group, bool odd) { (void)group.all_gather(ones(size(odd))); });
  add("all_gather's type", [=](const ProcessGroup& group, bool odd) { (void)group.all_gather(ones(10, dtype(odd))); });
  add("reduce_scatter's reduction", [=](const ProcessGroup& group, bool odd) {
    group.reduce_scatter(ones(10), ones(10 * group.world_size()), op(odd));
  });
  add("reduce_scatter's size", [=](const ProcessGroup& group, bool odd) {
    group.reduce_scatter(ones(size(odd)), ones(size(odd) * group.world_size()));
  });
  add("all_to_all's type", [=](const ProcessGroup& group, bool odd) {
    group.all_to_all(ones(group.world_size(), dtype(odd)), ones(group.world_size(), dtype(odd)));
  });
  // Two rows per rank. The odd rank has three rows to or from the next rank.
  const auto splits = [](const ProcessGroup& group, bool odd) {
    std::vector<std::int64_t> splits(static_cast<std::size_t>(group.world_size()), 2);
    if (odd) splits[static_cast<std::size_t>((group.rank() + 1) % group.world_size())] = 3;
    return splits;
  };
  add("all_to_all's input splits", [=](const ProcessGroup& group, bool odd) {
    const std::int64_t rows = 2 * group.world_size();
    group.all_to_all(ones(rows), ones(rows + (odd ? 1 : 0)), {}, splits(group, odd));
  });
  add("all_to_all's output splits", [=](const ProcessGroup& group, bool odd) {
    const std::int64_t rows = 2 * group.world_size();
    group.all_to_all(ones(rows + (odd ? 1 : 0)), ones(rows), splits(group, odd), {});
  });
  // One call reduces several tensors in symmetric memory.
  const auto reduce_pieces = [](const ProcessGroup& group, const std::vector<std::int64_t>& sizes) {
    const torch::Tensor memory = group.allocate({100}, at::kFloat);
    std::vector<at::Tensor> pieces;
    std::int64_t begin = 0;
    for (const std::int64_t piece : sizes)
      pieces.push_back(memory.narrow(0, std::exchange(begin, begin + piece), piece));
    ddpkit::testing::symmetric_memory(group).all_reduce_coalesced(pieces, c10d::ReduceOp(c10d::ReduceOp::SUM))->wait();
  };
  using Sizes = std::vector<std::int64_t>;
  add("the order of the pieces' sizes", [=](const ProcessGroup& group, bool odd) {
    reduce_pieces(group, odd ? Sizes{20, 10} : Sizes{10, 20});
  });
  add("the number of pieces", [=](const ProcessGroup& group, bool odd) {
    reduce_pieces(group, odd ? Sizes{10, 10, 10} : Sizes{10, 20});
  });
  return calls;
}

}  // namespace

RANK_TEST("one argument that differs on one rank is a mismatch on every rank", "[shm][errors]", 2, 3) {
  for (const int odd : {0, group.world_size() - 1}) {
    for (const OddCall& odd_call : odd_calls()) {
      INFO(odd_call.argument << " differs on rank " << odd);
      const ProcessGroup inner = another_group(group, odd_call.argument + std::to_string(odd));
      const auto error = caught<CollectiveMismatch>([&] {
        odd_call.call(inner, group.rank() == odd);
        // An all_to_all may have finished if this rank's pieces match; so may a root's part.
        inner.barrier();
      });
      if (group.world_size() == 3 && odd_call.argument.find("splits") == std::string::npos)
        CHECK(error.context().rank == odd);
      CHECK(error.context().sequence.has_value());
    }
  }
}

RANK_TEST("symmetric memory of two sizes is a mismatch on every rank", "[shm][errors]", 2) {
  CHECK_THAT(caught<CollectiveMismatch>([&] { group.allocate({group.rank() == 0 ? 100 : 200}, at::kFloat); }).what(),
             ContainsSubstring("rank 1"));
}

RANK_TEST("too much symmetric memory is an error with the sizes, and the group stays usable", "[shm][errors]", 2) {
  const auto error = caught<ddpkit::Error>([&] { group.allocate({std::int64_t{1} << 42}, at::kFloat); });
  CHECK_THAT(error.what(), ContainsSubstring("16777216.0 MiB asked for"));
  group.barrier();
}

RANK_TEST("wrong arguments are refused before anything is sent", "[shm][errors]", 2) {
  torch::Tensor tensor = torch::zeros({10});
  caught<ddpkit::InvalidArgument>([&] { group.broadcast(tensor, 2); });
  caught<ddpkit::InvalidArgument>([&] { group.all_reduce(torch::zeros({2}, at::kFloat), ddpkit::ReduceOp::kBand); });
  caught<ddpkit::InvalidArgument>([&] { group.all_reduce(torch::Tensor()); });
  group.barrier();
}

TEST_CASE("a killed rank is named to the others", "[ranks][shm][errors]") {
  ddpkit::testing::on_ranks("a killed rank is named to the others", 4,
                            [](ProcessGroup& group) {
                              group.barrier();
                              if (group.rank() == 3) ::kill(::getpid(), SIGKILL);
                              const auto start = std::chrono::steady_clock::now();
                              const auto error = caught<PeerLost>([&] { group.all_reduce(torch::ones({100})); });
                              CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30));
                              CHECK_THAT(error.what(), ContainsSubstring("rank 3 (pid "));
                              CHECK_THAT(error.what(), ContainsSubstring("all_reduce(sum) of 100 float32"));
                              CHECK(error.context().rank == 3);
                            },
                            {.doomed = {3}});
}

RANK_TEST("a rank that leaves early is named", "[shm][errors]", 2) {
  std::optional<ProcessGroup> inner = another_group(group, "inner", std::chrono::seconds(60));
  if (group.rank() == 1) {
    inner.reset();
  } else {
    const auto error = caught<PeerLost>([&] { inner->barrier(); });
    CHECK_THAT(error.what(), ContainsSubstring("rank 1"));
    CHECK_THAT(error.what(), ContainsSubstring("has left the group"));
  }
  group.barrier();
}

RANK_TEST("a silent rank is named when the timeout ends", "[shm][errors]", 2) {
  const ProcessGroup inner = another_group(group, "inner", std::chrono::milliseconds(700));
  inner.barrier();
  if (group.rank() == 0) {
    const auto error = caught<Timeout>([&] { inner.all_reduce(torch::ones({5})); });
    CHECK_THAT(error.what(), ContainsSubstring("rank 0 timed out after") && ContainsSubstring("waiting for rank 1"));
    CHECK_THAT(error.what(), ContainsSubstring("last called barrier (number 0)"));
  }
  group.barrier();
}

RANK_TEST("a rank that comes after the timeout of the others gets their error", "[shm][errors]", 2, 3) {
  const ProcessGroup inner = another_group(group, "inner", std::chrono::milliseconds(300));
  // Small tensors are in the control memory: the late rank finds the data of all ranks.
  const at::Tensor tensor = torch::ones({5}), message = torch::ones({5});
  if (group.rank() != 1) {
    const auto error = caught<Timeout>([&] { inner.all_reduce(tensor); });
    CHECK_THAT(error.what(), ContainsSubstring("waiting for rank 1"));
    group.barrier();
  } else {
    group.barrier();
    const auto error = caught<Timeout>([&] { inner.all_reduce(tensor); });
    CHECK_THAT(error.what(), ContainsSubstring("waiting for rank 1"));
    CHECK(error.context().rank == 1);
    CHECK(torch::equal(tensor, torch::ones({5})));
  }
  caught<Timeout>([&] { inner.check(); });
  caught<Timeout>([&] { inner.send(message, (inner.rank() + 1) % inner.world_size()); });
}

RANK_TEST("a rank that aborts sends its reason to the groups of split()", "[shm][errors]", 3) {
  const ProcessGroup inner = another_group(group, "inner", std::chrono::seconds(60));
  const ProcessGroup all = inner.split({0, 1, 2}).value(), again = all.split({0, 1, 2}).value();
  if (group.rank() == 2) {
    inner.abort("the loss is NaN");
  } else {
    for (const ProcessGroup& part : {all, again})
      CHECK(caught<PeerLost>([&] { part.barrier(); }).what() == std::string("rank 2 aborted: the loss is NaN"));
  }
  group.barrier();
}

RANK_TEST("a rank that aborts sends its reason to the other ranks", "[shm][errors]", 3) {
  const ProcessGroup inner = another_group(group, "inner", std::chrono::seconds(60));
  if (group.rank() == 2) {
    inner.abort("the loss is NaN");
  } else {
    const auto error = caught<PeerLost>([&] { inner.barrier(); });
    CHECK(error.what() == std::string("rank 2 aborted: the loss is NaN"));
    CHECK(error.context().rank == 2);  // Also if another rank forwarded the error.
  }
  group.barrier();
}

RANK_TEST("an error of one rank is an error on all ranks, and keeps its type on that rank", "[errors]", 1, 2, 3) {
  struct Special : ddpkit::InvalidArgument {
    using InvalidArgument::InvalidArgument;
  };
  const auto outcome = [&](const auto& thrown, int lowest_failing) -> std::string {
    const auto describe = [](const char* type, const ddpkit::Error& error) {
      return fmt::format("{} of rank {} in {}: {}", type, error.context().rank.value_or(-1), error.context().call,
                         error.what());
    };
    try {
      ddpkit::run_on_all_ranks(group, "the call", [&] {
        if (group.rank() >= lowest_failing) throw thrown;
      });
    } catch (const std::out_of_range& error) {
      return std::string("own: ") + error.what();
    } catch (const int number) {
      return "own: " + std::to_string(number);
    } catch (const Special& error) {
      return std::string("own: ") + error.what();
    } catch (const ddpkit::InvalidArgument& error) {
      return describe("InvalidArgument", error);
    } catch (const ddpkit::Error& error) {
      return describe("Error", error);
    }
    return "threw nothing";
  };
  const int last = group.world_size() - 1;
  for (const int lowest : {last, 0}) {
    CAPTURE(lowest);
    const bool is_own = group.rank() == lowest;
    const auto expected = [&](const char* type, const char* text) {
      return fmt::format("{} of rank {} in the call: {}{}", type, lowest,
                         is_own ? std::string() : fmt::format("rank {}: ", lowest), text);
    };
    CHECK(outcome(ddpkit::Error("no disk"), lowest) == expected("Error", "no disk"));
    CHECK(outcome(ddpkit::InvalidArgument("no file"), lowest) == expected("InvalidArgument", "no file"));
    CHECK(outcome(Special("no use"), lowest) == (is_own ? "own: no use" : expected("InvalidArgument", "no use")));
    CHECK(outcome(std::out_of_range("no room"), lowest) == (is_own ? "own: no room" : expected("Error", "no room")));
    CHECK(outcome(42, lowest) == (is_own ? "own: 42" : expected("Error", "an exception that is no std::exception")));
  }
  const auto texts = ddpkit::texts_of_all_ranks(group, "the call", [&] { return std::to_string(group.rank()); });
  REQUIRE(texts.size() == static_cast<std::size_t>(group.world_size()));
  for (int rank = 0; rank <= last; ++rank) CHECK(texts[static_cast<std::size_t>(rank)] == std::to_string(rank));
}
