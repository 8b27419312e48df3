// Tests on_ranks: a rank that fails, hangs or is absent must fail the test.
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <set>

#include "support/catch.h"
#include "support/children.h"
#include "support/ranks.h"

using ddpkit::ProcessGroup;
using ddpkit::testing::on_ranks;
using ddpkit::testing::RankTestOptions;

namespace {

/// Returns the failure that on_ranks reports in a separate process; empty if it does not fail.
std::string failure_of(const std::function<void(ProcessGroup&)>& body, const RankTestOptions& options = {}) {
  const auto result = ddpkit::testing::run_children(1,
                                                    [&](int) {
                                                      try {
                                                        on_ranks("on_ranks", 2, body, options);
                                                      } catch (const Catch::TestFailureException&) {
                                                      }
                                                      return ddpkit::testing::failed_assertions();
                                                    },
                                                    {.time_limit = std::chrono::seconds(200)});
  return result.ends[0].ok() ? "" : result.ends[0].output;
}

}  // namespace

TEST_CASE("on_ranks passes if all ranks run to the end", "[ranks][on_ranks]") {
  CHECK(failure_of([](ProcessGroup& group) { group.barrier(); }).empty());
}

TEST_CASE("on_ranks reports each way in which a rank fails", "[ranks][on_ranks]") {
  const auto on_rank_1 = [](const std::function<void()>& action) {
    return [action](ProcessGroup& group) {
      if (group.rank() == 1) action();
    };
  };
  const std::string failed = failure_of(on_rank_1([] {
    std::cout << "rank 1 was here" << std::endl;
    CHECK(1 + 1 == 3);
  }));
  CHECK_THAT(failed, ContainsSubstring("rank 1 of 2 exited with code 1"));
  CHECK_THAT(failed, ContainsSubstring("rank 1 was here"));
  CHECK_THAT(failed, ContainsSubstring("1 + 1 == 3"));
  CHECK_THAT(failure_of(on_rank_1([] { REQUIRE(2 + 2 == 5); })), ContainsSubstring("2 + 2 == 5"));
  CHECK_THAT(failure_of(on_rank_1([] { throw std::runtime_error("no luck"); })), ContainsSubstring("no luck"));
  CHECK_THAT(failure_of(on_rank_1([] { ::raise(SIGKILL); })), ContainsSubstring("rank 1 of 2 was killed by signal 9"));
  CHECK_THAT(failure_of(on_rank_1([] { std::_Exit(0); })), ContainsSubstring("rank 1 of 2, whose output is"));
  CHECK_THAT(failure_of(on_rank_1([] {}), {.doomed = {1}}), ContainsSubstring("rank 1 of 2, whose output is"));
  const auto hang = on_rank_1([] {
    while (true) ::pause();
  });
  CHECK_THAT(failure_of(hang, {.time_limit = std::chrono::seconds(3)}), ContainsSubstring("did not end in time"));
}

RANK_TEST("ranks have one thread each, a launcher's variables, and memory at different addresses", "[on_ranks]", 2) {
  CHECK(at::get_num_threads() == 1);
  CHECK(std::string(std::getenv("OMP_NUM_THREADS")) == "1");
  CHECK(std::getenv("RANK") == std::to_string(group.rank()));
  CHECK(std::getenv("WORLD_SIZE") == std::to_string(group.world_size()));
  const torch::Tensor large = torch::empty({1 << 24});
  const auto addresses = group.all_gather_bytes(std::to_string(reinterpret_cast<std::uintptr_t>(large.data_ptr())));
  CHECK(std::set(addresses.begin(), addresses.end()).size() == addresses.size());
}
