#include "support/catch.h"

#include "comm/timeline.h"

using ddpkit::clock_offset;
using ddpkit::ClockReading;
using ddpkit::json_string;

TEST_CASE("text becomes a JSON string", "[timeline]") {
  CHECK(json_string("") == "\"\"");
  CHECK(json_string("a \"b\" \\ c") == R"("a \"b\" \\ c")");
  CHECK(json_string("line\nbell\a") == R"("line\u000abell\u0007")");
  CHECK(json_string("Größe") == "\"Größe\"");
}

TEST_CASE("clocks are compared by exchanges that nobody leaves before all have entered", "[timeline]") {
  // The other clock is 5,000 behind. The reference was late in the first exchange, the other clock in the second.
  const std::vector<ClockReading> reference = {{10'000, 10'400}, {20'000, 20'900}};
  const std::vector<ClockReading> other = {{4'000, 5'500}, {15'700, 16'000}};
  const auto offset = clock_offset(reference, other);
  CHECK(std::abs(offset.ns - 5'000) <= offset.error_ns);
  CHECK(offset.error_ns <= 400);
  // More exchanges never increase the error.
  CHECK(clock_offset({reference[0]}, {other[0]}).error_ns >= offset.error_ns);
}
