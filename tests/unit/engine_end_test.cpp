// Ranks that end while other ranks rendezvous with them or map their memory. Rank 1 is a child process that performs a
// rank's first steps by hand and then ends, so the moment is the same in every run.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include <ddpkit/error.h>

#include "comm/shm/engine.h"
#include "comm/shm/operation.h"
#include "support/catch.h"

using namespace ddpkit::shm;

namespace {

constexpr std::chrono::minutes kPatience(2);  // Only a hang reaches it.
constexpr std::size_t kSegmentBytes = 4096;

/// The memory of a group of two.
class Control {
 public:
  RankBlock& block(int rank) const { return rank_blocks(mapping_.data())[rank]; }
  Mapping open() const { return Mapping::open({.rank = 0, .pid = ::getpid()}, mapping_.descriptor(), mapping_.size()); }

 private:
  Mapping mapping_ = create_control(2);
};

/// Forks a process that runs `body` and ends. Returns its id.
pid_t child_that(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  try {
    body();
  } catch (...) {
    ::_exit(1);
  }
  ::_exit(0);
}

void check_ended(pid_t child) {
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(status == 0);
}

void check_names_rank_1(const std::function<void()>& call) {
  try {
    call();
    FAIL("no error");
  } catch (const ddpkit::PeerLost& error) {
    CHECK(error.context().rank == 1);
    CHECK_THAT(error.what(), ContainsSubstring("rank 1 (pid ") && ContainsSubstring("ended"));
  }
}

}  // namespace

TEST_CASE("a rank that ends before it joins is named at once") {
  const Control control;
  const pid_t child = child_that([] {});
  check_ended(child);
  check_names_rank_1([&] { Engine(control.open(), 0, {::getpid(), child}, kPatience); });
}

TEST_CASE("a rank that ends before the others have mapped its memory is named") {
  const Control control;
  const pid_t child = child_that([&] {
    RankBlock& self = control.block(1);
    self.staging_fd = self.channels_fd = 9999;
    self.joined.store(2);
  });
  check_ended(child);
  check_names_rank_1([&] { Engine(control.open(), 0, {::getpid(), child}, kPatience); });
  // A third rank would be notified too.
  CHECK(static_cast<ddpkit::FailureKind>(control.block(0).failure.load()) == ddpkit::FailureKind::kPeerLost);
  CHECK(control.block(0).failed_rank == 1);
}

TEST_CASE("a rank that fails because of another one is not blamed for its closed memory") {
  const Control control;
  const pid_t child = child_that([&] {
    RankBlock& self = control.block(1);
    self.staging_fd = self.channels_fd = 9999;
    self.joined.store(2);
    constexpr std::string_view kText = "rank 7 (pid 1) ended while the ranks were meeting";
    std::copy(kText.begin(), kText.end(), self.failure_text.begin());
    self.failed_rank = 7;
    self.failure.store(static_cast<std::uint32_t>(ddpkit::FailureKind::kPeerLost));
  });
  check_ended(child);
  try {
    Engine(control.open(), 0, {::getpid(), child}, kPatience);
    FAIL("no error");
  } catch (const ddpkit::PeerLost& error) {
    CHECK(error.context().rank == 7);
    CHECK_THAT(error.what(), ContainsSubstring("rank 7 (pid 1) ended"));
  }
}

TEST_CASE("a rank that ends while the others map its part of a new segment is named") {
  const Control control;
  const int parent = ::getpid();
  const pid_t child = child_that([&] {
    auto* engine = new Engine(control.open(), 1, {parent, ::getpid()}, kPatience);
    // The two exchanges of an allocation: the offered memory, and that all offered memory is mapped.
    SegmentOffer own{.bytes = kSegmentBytes, .fd = 9999};
    for (int exchange = 0; exchange < 2; ++exchange) {
      static SegmentOffer offers[2];
      engine->post({.kind = CollectiveKind::kAllGather,
                    .input = &own,
                    .numel = sizeof own,
                    .outputs = {&offers[0], &offers[1]}});
    }
  });
  Engine engine(control.open(), 0, {parent, child}, kPatience);
  check_ended(child);
  check_names_rank_1([&] { engine.allocate(kSegmentBytes); });
  check_names_rank_1([&] { engine.run({.kind = CollectiveKind::kBarrier}); });
}
