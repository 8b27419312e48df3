// The trainer finds a pattern in a market that has one, and none in a market without.
#include "clstm_ppo_program.h"

using namespace clstm_ppo::testing;

namespace {

// Holds out the last 5 % of 10,000 days: two years.
nlohmann::json test_of(const Folder& market, const Arguments& more) {
  const Run run = run_clstm_ppo(2, joined({"--data", market / "set", "--test-share", "0.05", "--json"}, more));
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  return run.json(run.lines.size() - 2)["test"];
}

}  // namespace

TEST_CASE("clstm_ppo: two ranks earn 80 % of the best return on days they never saw, and nothing without the pattern",
          "[clstm_ppo]") {
  for (const std::uint64_t seed : {0U, 1U, 2U}) {
    CAPTURE(seed);
    const Folder market;
    clstm_ppo::generate(market / "set", {.seed = seed});
    const nlohmann::json test = test_of(market, {});
    CHECK(test["share_of_best"] >= 0.8);
    const double best = test["best_with_the_pattern"]["return"];
    CHECK(best > 2);
    const nlohmann::json shuffled = test_of(market, {"--shuffle-prices"});
    CHECK_FALSE(shuffled.contains("share_of_best"));
    CHECK(shuffled["policy"]["return"] < 0.1 * best);
  }
}
