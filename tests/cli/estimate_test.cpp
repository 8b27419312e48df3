// Tests of the command `ddpkit estimate`, and comparisons with published curves.
#include <cmath>
#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "cli/run_ddpkit.h"
#include "estimate/profile_file.h"
#include "estimate/published.h"

using ddpkit::cli::read_profile;
using ddpkit::testing::Folder;
using ddpkit::testing::Run;
using ddpkit::testing::run_ddpkit;
using ddpkit::testing::write_file;

namespace {

std::string event(const std::string& name, int rank, int track, double begin, double length, const std::string& more) {
  return fmt::format(R"({{"name":"{}","ph":"X","pid":{},"tid":{},"ts":{},"dur":{},"args":{{{}}}}})", name, rank, track,
                     begin, length, more);
}

/// Writes steps of 100 us: 20 for forward, 5 for the loss, 45 for backward. Two buckets are ready at 15 and 40 of
/// backward.
std::string timeline(int ranks, int steps) {
  std::string text = R"({"traceEvents":[{"name":"process_name","ph":"M","pid":0,"tid":0,"args":{"name":"rank 0"}})";
  for (int rank = 0; rank < ranks; ++rank) {
    for (int step = 0; step < steps; ++step) {
      const double at = 1000 + 100 * step + (step < 3 ? 5 * step : 10);  // The first steps are slower.
      const std::string number = fmt::format(R"("step":{})", step);
      for (const std::string& one :
           {event("forward", rank, 0, at, 20, ""), event("backward", rank, 0, at + 25, 45, number),
            event("bucket 0", rank, 1, at + 40, 10, number + R"(,"bytes":1000,"parameters":2)"),
            event("bucket 1", rank, 2, at + 65, 4, number + R"(,"bytes":3000,"parameters":1)")})
        text += ",\n" + one;
    }
  }
  return text + "]}";
}

}  // namespace

TEST_CASE("a timeline becomes a profile of one step", "[estimate]") {
  const Folder folder;
  write_file(folder / "one.json", timeline(1, 20));
  const auto profile = read_profile(folder / "one.json");
  CHECK(profile.forward_us == Approx(25));
  CHECK(profile.backward_us == Approx(45));
  CHECK(profile.other_us == Approx(30));
  REQUIRE(profile.buckets.size() == 2);
  CHECK(profile.buckets[0].ready_us == Approx(15));
  CHECK(profile.buckets[0].bytes == 1000);
  CHECK(profile.buckets[1].ready_us == Approx(40));
  CHECK(profile.buckets[1].bytes == 3000);
  CHECK(profile.steps_us.size() == 16);  // Without the first three steps, and the last step, which has no end.
  // With two ranks, the wait at the end of backward is not compute time.
  write_file(folder / "two.json", timeline(2, 20));
  const auto two = read_profile(folder / "two.json");
  CHECK(two.backward_us == Approx(40));
  CHECK(two.step_us() == Approx(95));
}

TEST_CASE("a file that is not a timeline is named with its fault", "[estimate]") {
  const Folder folder;
  const auto refused = [&](const std::string& text, const std::string& why) {
    write_file(folder / "bad.json", text);
    CAPTURE(text.substr(0, 60));
    CHECK_THROWS_WITH(read_profile(folder / "bad.json"), ContainsSubstring("bad.json: ") && ContainsSubstring(why));
  };
  CHECK_THROWS_WITH(read_profile(folder / "none.json"), ContainsSubstring("none.json: cannot be read"));
  refused("", "is no timeline of ddpkit");
  refused("{}", "traceEvents");
  refused("[1, 2]", "is no timeline of ddpkit");
  refused(timeline(1, 20).substr(0, 3000), "is no timeline of ddpkit");
  refused(timeline(1, 8), "it holds 8 steps of rank 0, but 9 are needed");
  std::string odd = timeline(1, 20);
  odd.insert(odd.size() - 2, ",\n" + event("bucket 9", 0, 10, 2999, 1, R"("step":19,"bytes":8)"));
  refused(odd, "its last step has a bucket on track 10, which no step before it has");
  refused(R"([{"ph":"X","pid":4294967296}])", "pid is 4294967296");
  refused(R"([{"ph":"X","pid":0,"tid":0,"name":"backward","ts":0,"dur":1,"args":{"step":1e60}}])", "step is 1e+60");
  refused(R"({"traceEvents":[{"ph":"X","pid":"zero"}]})", "is no timeline of ddpkit");
  refused(R"([{"ph":"X","pid":0,"tid":0,"name":"forward","ts":1e999,"dur":1}])", "is no timeline of ddpkit");
}

TEST_CASE("published measurements are predicted", "[estimate]") {
  int curves[2] = {};
  for (const auto& point : ddpkit::cli::published_points()) {
    CAPTURE(point.curve, point.what, point.measured, point.predicted);
    CHECK(std::isfinite(point.error()));
    if (point.curve.starts_with("nanotron")) continue;  // Explained in docs/scaling.md, not predicted.
    CHECK(std::abs(point.error()) <= .15);
    ++curves[point.curve.starts_with("PyTorch")];
  }
  CHECK(curves[0] == 8);
  CHECK(curves[1] == 8);
}

TEST_CASE("ddpkit estimate prints speed-up, efficiency and cost", "[estimate]") {
  const Folder folder;
  const Run run = run_ddpkit(folder, {"estimate", "--compute-ms", "95", "--params", "7.16M", "--hours", "10", "--json",
                                      "--devices", "1,8", "--price-per-hour", "2", "--plot", folder / "curve.svg"});
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  REQUIRE(run.lines.size() == 1);
  const auto document = nlohmann::json::parse(run.lines[0]);
  CHECK(document["gradient_bytes"] == 4 * 7.16e6);
  const auto& estimates = document["estimates"];
  REQUIRE(estimates.size() == 2);
  CHECK(estimates[0]["cost"].get<double>() == Approx(20));
  CHECK(estimates[1]["speedup"].get<double>() > 7);
  CHECK(estimates[1]["speedup"].get<double>() < 8);
  CHECK(estimates[1]["cost"].get<double>() > 20);
  CHECK(ddpkit::testing::read_file(folder / "curve.svg").find("</svg>") != std::string::npos);

  const Run fixed = run_ddpkit(folder, {"estimate", "--compute-ms", "95", "--params", "7.16M", "--other-ms", "2",
                                        "--fixed-global-batch", "--sharded-update", "--devices", "1,64", "--json"});
  INFO(fixed.errors);
  REQUIRE(fixed.exit_code == 0);
  const auto strong = nlohmann::json::parse(fixed.lines.at(0));
  CHECK(strong["estimates"][1]["step_us"].get<double>() < 97'000. / 32);
  CHECK(strong["below_50_percent_from"].get<int>() > 64);
  CHECK(strong["below_80_percent_from"].get<int>() < strong["below_50_percent_from"].get<int>());

  const std::vector<std::string> sharded = {
      "estimate", "--compute-ms",  "95", "--params",  "100M", "--fully-sharded", "--unit-params",
      "2M",       "--root-params", "4M", "--devices", "1,8",  "--other-ms",      "8"};
  const Run table = run_ddpkit(folder, sharded);
  INFO(table.errors);
  REQUIRE(table.exit_code == 0);
  CHECK(table.lines.at(table.lines.size() - 4) == "memory of a device in MB, without activations");
  CHECK_THAT(table.lines.back(), ContainsSubstring("8        50.0        50.0       100.0         32.0"));
  auto as_json = sharded;
  as_json.push_back("--json");
  const auto eight = nlohmann::json::parse(run_ddpkit(folder, as_json).lines.at(0))["estimates"].at(1);
  CHECK(eight["memory_bytes"]["weights"].get<double>() == Approx(4 * 100e6 / 8));
  CHECK(eight["memory_bytes"]["whole_units"].get<double>() == Approx(4 * (2 * 2e6 + 4e6)));
  CHECK(eight["memory_bytes"]["total"].get<double>() == Approx(4 * (4 * 100e6 / 8 + 2 * (2 * 2e6 + 4e6))));
  CHECK(eight["step_us"].get<double>() > 96'000);

  write_file(folder / "run.json", timeline(1, 20));
  write_file(folder / "collectives.csv",
             "collective,backend,ranks,bytes,memory,us,algbw_GBps,busbw_GBps\n"
             "all_reduce,shm,2,1000,symmetric,3.0,0.3,0.3\nall_reduce,shm,2,3000,symmetric,7.0,0.3,0.3\n"
             "all_reduce,shm,2,1000,private,30.0,0.3,0.3\nall_reduce,gloo,2,1000,private,300,0.3,0.3\n");
  const Run measured = run_ddpkit(
      folder, {"estimate", "--profile", folder / "run.json", "--collectives", folder / "collectives.csv", "--json"});
  INFO(measured.errors);
  REQUIRE(measured.exit_code == 0);
  const auto two = nlohmann::json::parse(measured.lines.at(0))["estimates"].at(1);
  CHECK(two["devices"] == 2);
  CHECK(two["step_us"].get<double>() == Approx(110));  // On the CPU, no communication is hidden.

  write_file(folder / "four.csv",
             "collective,backend,ranks,bytes,memory,us,algbw_GBps,busbw_GBps\n"
             "all_reduce,shm,4,1000,symmetric,3.0,0.3,0.3\nall_reduce,shm,4,3000,symmetric,7.0,0.3,0.3\n");
  const Run four =
      run_ddpkit(folder, {"estimate", "--profile", folder / "run.json", "--collectives", folder / "four.csv"});
  INFO(four.errors);
  CHECK(four.exit_code == 0);
}

TEST_CASE("ddpkit estimate refuses what it cannot use in one sentence", "[estimate]") {
  const Folder folder;
  write_file(folder / "wrong.csv", "a,b\n1,2\n");
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{}, "a step is needed: --profile FILE, or --compute-ms and --params"},
      {{"--compute-ms", "1"}, "a step is needed"},
      {{"--compute-ms", "-1", "--params", "1M"}, "--compute-ms"},
      {{"--compute-ms", "0", "--params", "1M"}, "--compute-ms must be a number above 0, not '0'"},
      {{"--compute-ms", "nan", "--params", "1M"}, "--compute-ms must be a number above 0, not 'nan'"},
      {{"--compute-ms", "1", "--other-ms", "inf", "--params", "1M"},
       "--other-ms must be a number of at least 0, not 'inf'"},
      {{"--compute-ms", "1", "--element-bytes", "1.5", "--params", "1M"},
       "must be a whole number from 1 to 16, not '1.5'"},
      {{"--compute-ms", "1", "--params", "-1"}, "--params must be a number such as 7.16M or 1.2G, not '-1'"},
      {{"--compute-ms", "1", "--params", "1e30"}, "4e+30 bytes take 1.53e+23 buckets"},
      {{"--compute-ms", "1", "--params", "1Z"}, "--params"},
      {{"--compute-ms", "1", "--params", "1M", "--cluster", "h1000"}, "--cluster"},
      {{"--compute-ms", "1", "--params", "1M", "--devices", "0"}, "--devices"},
      {{"--compute-ms", "1", "--params", "1M", "--collectives", folder / "wrong.csv"}, "wrong.csv:1: "},
      {{"--compute-ms", "1", "--params", "1M", "--plot", "/nowhere/x.svg"}, "cannot write /nowhere/x.svg"},
      {{"--compute-ms", "1", "--params", "1M", "--fully-sharded"}, "--fully-sharded needs --unit-params"},
      {{"--compute-ms", "1", "--params", "1M", "--prefetch", "2"}, "--fully-sharded"},
      {{"--profile", "/nowhere/x.json"}, "/nowhere/x.json: cannot be read"}};
  for (const auto& [arguments, why] : wrong) {
    std::vector<std::string> all = {"estimate"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const Run run = run_ddpkit(folder, all);
    CAPTURE(run.errors);
    CHECK(run.exit_code != 0);
    CHECK(run.errors.find(why) != std::string::npos);
    CHECK(std::count(run.errors.begin(), run.errors.end(), '\n') == 1);
  }
}
