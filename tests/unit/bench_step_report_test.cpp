// The results that `ddpkit bench step` computes from its ranks' times.
#include <ddpkit/error.h>

#include "bench/step_plan.h"
#include "bench/step_row.h"
#include "support/catch.h"

using namespace ddpkit::bench;

TEST_CASE("A rank's reports of steps are read as they were written", "[bench]") {
  const auto turn =
      parse_step_turn(to_report(StepTurn{.start_us = 14321098765.125, .us = {1.5, 2000.25}, .exposed_us = {0.125, 3}}));
  REQUIRE(turn);
  CHECK(turn->start_us == 14321098765.125);
  CHECK(turn->us == std::vector<double>{1.5, 2000.25});
  CHECK(turn->exposed_us == std::vector<double>{0.125, 3});
  const auto alone = parse_step_turn(to_report(StepTurn{.start_us = 1, .us = {7}, .exposed_us = {}}));
  REQUIRE(alone);
  CHECK(alone->exposed_us.empty());
  const auto end = parse_step_end(to_report(
      StepEnd{.params = 1, .buckets = 2, .reduced_bytes = 3, .peak_bytes = 1ull << 40, .memory_bytes = 6, .wrong = 5}));
  REQUIRE(end);
  CHECK(end->memory_bytes == 6);
  CHECK(end->params == 1);
  CHECK(end->buckets == 2);
  CHECK(end->reduced_bytes == 3);
  CHECK(end->peak_bytes == 1ull << 40);
  CHECK(end->wrong == 5);
  for (const char* text : {"", "ready", "turn", "turn 1", "turn 1 2", "turn 1  ", "turn x 1 ", "turn 1 1,x ",
                           "end 1 2 3 4", "end 1 2 3 4 x", "end 1 2 3 4 5 x"}) {
    CAPTURE(text);
    CHECK_FALSE(parse_step_turn(std::string(kStepReport) + text));
    CHECK_FALSE(parse_step_end(std::string(kStepReport) + text));
  }
}

TEST_CASE("A step on ranks ends with its last rank, and each step of independent processes counts alone", "[bench]") {
  const std::vector<StepTurn> turns = {{.start_us = 100, .us = {1, 9, 3}, .exposed_us = {1, 1, 1}},
                                       {.start_us = 102, .us = {5, 3, 6}, .exposed_us = {3, 3, 3}}};
  StepSeries together, strangers;
  together.add_turn(turns, true);
  strangers.add_turn(turns, false);
  CHECK(together.us() == 5);   // The ranks end at 107, 110 and 116; the last start is at 102: 5, 3, 6.
  CHECK(strangers.us() == 4);  // The median of 1, 3, 3, 5, 6, 9.
  REQUIRE(together.exposed_us());
  CHECK(*together.exposed_us() == 2);
}

TEST_CASE("The ratio to alone is that within rounds, so that a slow round changes nothing", "[bench]") {
  StepSeries alone, ranks;
  for (const double slowness : {1.0, 1.0, 7.0, 1.0, 1.0}) {
    alone.add_turn({{.start_us = 0, .us = {10 * slowness}, .exposed_us = {}}}, false);
    ranks.add_turn({{.start_us = 0, .us = {11 * slowness}, .exposed_us = {}},
                    {.start_us = 0, .us = {12 * slowness}, .exposed_us = {}}},
                   true);
  }
  CHECK(ranks.ratio_to(alone) == Approx(1.2));
  CHECK(alone.ratio_to(alone) == 1);
  CHECK_FALSE(alone.exposed_us());
}

TEST_CASE("A row's end is the largest of its ranks', and the sum of their wrong weights", "[bench]") {
  const StepEnd end = over_ranks({{.params = 5, .buckets = 2, .reduced_bytes = 20, .peak_bytes = 7, .wrong = 0},
                                  {.params = 5, .buckets = 2, .reduced_bytes = 20, .peak_bytes = 9, .wrong = 3},
                                  {.params = 5, .buckets = 2, .reduced_bytes = 20, .peak_bytes = 8, .wrong = 4}});
  CHECK(end.params == 5);
  CHECK(end.peak_bytes == 9);
  CHECK(end.wrong == 7);
  const StepRow row{.system = "ddpkit-shm",
                    .model = "mlp-10k",
                    .optimizer = "sgd",
                    .batch = 32,
                    .ranks = 2,
                    .bucket_cap_mb = "0.5",
                    .us = 1234.5678,
                    .ratio_to_alone = 1.05,
                    .exposed_us = 12.5,
                    .end = end};
  CHECK(to_csv(row) == "ddpkit-shm,5,32,2,1234.568,1.0500,mlp-10k,sgd,0.5,2,12.500,20,9,7,0");
  CHECK(table_row(row).ends_with(" 7"));
}

TEST_CASE("A step's models and bucket caps have names", "[bench]") {
  CHECK(mlp_shape("mlp-106k")->hidden == 128);
  CHECK(model_argument("mlp-7.6m") == "mlp-1500x4");
  CHECK(model_argument("mlp-9x2") == "mlp-9x2");
  CHECK(model_argument("lstm") == "lstm");
  CHECK_THROWS_AS(mlp_shape("mlp-x3"), ddpkit::InvalidArgument);
  CHECK_FALSE(bucket_caps("default").bucket_cap_mb);
  CHECK(*bucket_caps("0.0625").bucket_cap_mb == 0.0625);
  CHECK(*bucket_caps("0.0625").first_bucket_cap_mb == 0.0625);
  CHECK(*bucket_caps("25").first_bucket_cap_mb == 1);
  CHECK(*bucket_caps("one").first_bucket_cap_mb > 1000);
  CHECK_THROWS_AS(bucket_caps("-1"), ddpkit::InvalidArgument);
}
