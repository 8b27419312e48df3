#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <thread>

#include <ddpkit/error.h>

#include "bench/bars.h"
#include "bench/collective.h"
#include "bench/limit.h"
#include "bench/plan.h"
#include "bench/plot.h"
#include "bench/row.h"
#include "bench/timing.h"
#include "support/catch.h"

using namespace ddpkit::bench;
using namespace std::string_literals;

namespace {

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

/// A world of one rank.
class Alone : public Peers {
 public:
  void barrier() override {}
  double from_rank_zero(double value) override { return value; }
  void max_over_ranks(std::vector<double>& values) override { batches = values.size(); }
  std::size_t batches = 0;
};

}  // namespace

TEST_CASE("sizes in bytes are read and written with units of 1024", "[bench]") {
  CHECK(parse_bytes("1") == 1);
  CHECK(parse_bytes("4096") == 4096);
  CHECK(parse_bytes("4K") == 4096);
  CHECK(parse_bytes("4k") == 4096);
  CHECK(parse_bytes("4KiB") == 4096);
  CHECK(parse_bytes("96M") == 96u << 20);
  CHECK(parse_bytes("96MB") == 96u << 20);
  CHECK(parse_bytes("2G") == UINT64_C(2) << 30);
  CHECK(parse_bytes("12B") == 12);
  for (const char* wrong : {"", "0", "K", "4Q", "-4K", "4KK", "1.5M", " 4", "4 K", "99999999999999999999", "100000T"}) {
    CAPTURE(wrong);
    CHECK_THROWS_AS(parse_bytes(wrong), ddpkit::InvalidArgument);
  }
  CHECK(format_bytes(4096) == "4 KiB");
  CHECK(format_bytes(96 << 20) == "96 MiB");
  CHECK(format_bytes(1000) == "1000 B");
  CHECK(format_bytes(1536) == "1536 B");
}

TEST_CASE("the sizes of a sweep end at the largest", "[bench]") {
  using Sizes = std::vector<std::uint64_t>;
  CHECK(size_steps(4, 64, 4) == Sizes{4, 16, 64});
  CHECK(size_steps(4, 65, 4) == Sizes{4, 16, 64, 65});
  CHECK(size_steps(8, 8, 2) == Sizes{8});
  CHECK(size_steps(4096, 96 << 20, 4).size() == 9);
  CHECK(size_steps(UINT64_C(1) << 45, UINT64_C(1) << 46, 1 << 20) == Sizes{UINT64_C(1) << 45, UINT64_C(1) << 46});
  CHECK_THROWS_AS(size_steps(8, 4, 2), ddpkit::InvalidArgument);
}

TEST_CASE("a plan survives its way to the ranks", "[bench]") {
  Plan plan{.collectives = {"all_reduce", "broadcast"},
            .memory = {"private"},
            .min_bytes = "8K",
            .max_bytes = "1M",
            .step_factor = 3,
            .timing = {.iterations = 7, .warmup = 2, .batch_us = 30},
            .no_pin = true};
  ddpkit::train::Options options("rank", "");
  Plan read;
  declare(options, read);
  const std::vector<std::string> arguments = to_arguments(plan);
  std::vector<const char*> pointers = {"rank"};
  for (const std::string& argument : arguments) pointers.push_back(argument.c_str());
  options.parse(static_cast<int>(pointers.size()), pointers.data());
  CHECK(read.collectives == plan.collectives);
  CHECK(read.memory == plan.memory);
  CHECK(read.sizes() == plan.sizes());
  CHECK(read.timing.iterations == 7);
  CHECK(read.timing.warmup == 2);
  CHECK(read.timing.batch_us == 30);
  CHECK(read.no_pin);
}

TEST_CASE("bus factors are those of nccl-tests", "[bench]") {
  const auto factor = [](const char* name, int ranks) { return find_collective(name).bus_factor(ranks); };
  CHECK(factor("all_reduce", 2) == 1);
  CHECK(factor("all_reduce", 8) == 1.75);
  for (const char* name : {"all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"}) {
    CHECK(factor(name, 2) == 0.5);
    CHECK(factor(name, 8) == 0.875);
  }
  for (const char* name : {"broadcast", "reduce", "send_recv"}) CHECK(factor(name, 8) == 1);
  CHECK_THROWS_AS(find_collective("allreduce"), ddpkit::InvalidArgument);
}

TEST_CASE("bytes are rounded to a size that the ranks can divide", "[bench]") {
  CHECK(exact_bytes(find_collective("all_reduce"), 4099, 3) == 4096);
  CHECK(exact_bytes(find_collective("all_gather"), 4096, 3) == 4092);
  CHECK(exact_bytes(find_collective("all_gather"), 4, 8) == 32);
  CHECK(exact_bytes(find_collective("broadcast"), 1, 8) == 4);
}

TEST_CASE("wrong, misplaced and missing elements are counted", "[bench]") {
  constexpr int kRanks = 3;
  constexpr std::size_t kSlice = 40, kWhole = kRanks * kSlice;
  std::vector<std::vector<float>> inputs(kRanks, std::vector<float>(kWhole));
  for (int rank = 0; rank < kRanks; ++rank) fill_input(rank, inputs[static_cast<std::size_t>(rank)].data(), kWhole);
  std::vector<float> sum(kWhole), stacked(kWhole), exchanged(kWhole);
  for (std::size_t i = 0; i < kWhole; ++i) {
    for (const auto& input : inputs) sum[i] += input[i];
    stacked[i] = inputs[i / kSlice][i % kSlice];
    exchanged[i] = inputs[i / kSlice][kSlice + i % kSlice];
  }
  const Place all{1, kRanks, kWhole}, one{1, kRanks, kSlice};
  const auto wrong = [](const char* name, const Place& place, const std::vector<float>& output, std::size_t from = 0,
                        std::size_t count = 0) {
    return count_wrong(find_collective(name), place, output.data() + from, count ? count : output.size());
  };
  CHECK(wrong("all_reduce", all, sum) == 0);
  CHECK(wrong("broadcast", all, inputs[0]) == 0);
  CHECK(wrong("all_gather", one, stacked) == 0);
  CHECK(wrong("reduce_scatter", one, sum, kSlice, kSlice) == 0);
  CHECK(wrong("scatter", one, inputs[0], kSlice, kSlice) == 0);
  CHECK(wrong("all_to_all", one, exchanged) == 0);
  CHECK(wrong("send_recv", all, inputs[0]) == 0);
  CHECK(wrong("gather", {0, kRanks, kSlice}, stacked) == 0);
  CHECK(wrong("reduce", {0, kRanks, kWhole}, inputs[0]) > 100);
  CHECK(wrong("reduce", all, inputs[0]) == 0);  // Only the root has a result.

  CHECK(wrong("broadcast", all, inputs[1]) > 100);
  CHECK(wrong("reduce_scatter", one, sum, 0, kSlice) > 30);
  std::rotate(stacked.begin(), stacked.begin() + kSlice, stacked.end());
  CHECK(wrong("all_gather", one, stacked) > 100);
  sum[7] += 1;
  sum[9] = std::numeric_limits<float>::quiet_NaN();
  CHECK(wrong("all_reduce", all, sum) == 2);
}

TEST_CASE("a row's bandwidths, its line of CSV and the way back", "[bench]") {
  const Row row{"all_reduce", "shm", 4, 1000000, "symmetric", 100, 3};
  CHECK(row.algbw_GBps() == Approx(10));
  CHECK(row.busbw_GBps() == Approx(15));
  CHECK(kCsvHeader == "collective,backend,ranks,bytes,memory,us,algbw_GBps,busbw_GBps");
  CHECK(to_csv(row) == "all_reduce,shm,4,1000000,symmetric,100.0000,10.000000,15.000000");
  const auto read = parse_report(to_report(row));
  REQUIRE(read);
  CHECK(to_csv(*read) == to_csv(row));
  CHECK(read->wrong == 3);
  for (const std::string& line :
       {std::string("warning, of, something"), to_csv(row), std::string(kCsvHeader) + ",wrong",
        "nothing,shm,4,1,private,1,1,1,0"s, "all_reduce,shm,4,1x,private,1,1,1,0"s, ""s})
    CHECK_FALSE(parse_report(line));
  CHECK_THAT(table_row({"all_reduce", "gloo", 2, 4096, "private", 2119}), ContainsSubstring("0.00193"));
}

TEST_CASE("a plot has a curve for each backend and kind of memory", "[bench]") {
  std::vector<Row> rows;
  for (const std::uint64_t bytes : {4096u, 65536u, 1048576u}) {
    for (const int ranks : {2, 8}) {
      rows.push_back({"all_reduce", "shm", ranks, bytes, "symmetric", 2});
      rows.push_back({"all_reduce", "shm", ranks, bytes, "private", 4});
      rows.push_back({"all_reduce", "gloo", ranks, bytes, "private", 300});
      rows.push_back({"all_reduce", "limit", ranks, bytes, "symmetric", 1});
    }
  }
  const std::vector<Panel> panels = panels_of(rows);
  REQUIRE(panels.size() == 2);
  CHECK(panels[0].title == "all_reduce, 2 ranks");
  REQUIRE(panels[1].curves.size() == 4);
  CHECK(panels[1].curves[0].name == "shm, symmetric memory");
  CHECK(panels[1].curves[3].dashed);
  CHECK(panels[1].curves[0].points.size() == 3);
  const std::string svg = draw_log_log(panels, "GB/s & <more>");
  CHECK(svg.starts_with("<svg "));
  CHECK(svg.ends_with("</svg>\n"));
  CHECK(count_of(svg, "<polyline") == 8);
  CHECK(count_of(svg, "<circle") == 24);
  CHECK(count_of(svg, "<g ") == count_of(svg, "</g>"));
  CHECK_THAT(svg, ContainsSubstring("GB/s &amp; &lt;more&gt;"));
  CHECK_THAT(svg, ContainsSubstring("64 KiB"));
}

TEST_CASE("a plot is logarithmic, and omits values that are not positive", "[bench]") {
  const std::string svg = draw_log_log(
      {{"title", {{"curve", {{1024, 1}, {4096, 10}, {16384, 100}, {1, 0}, {0, 1}}}}}, {"nothing", {{"empty", {}}}}},
      "y");
  CHECK(count_of(svg, "<g ") == 1);
  CHECK(count_of(svg, "nan") + count_of(svg, "inf") == 0);
  const auto points = svg.find("points=\"") + 8;
  double x[3], y[3];
  REQUIRE(std::sscanf(svg.c_str() + points, "%lf,%lf %lf,%lf %lf,%lf\"", &x[0], &y[0], &x[1], &y[1], &x[2], &y[2]) ==
          6);
  CHECK(x[1] - x[0] == Approx(x[2] - x[1]).margin(0.2));
  CHECK(y[1] - y[0] == Approx(y[2] - y[1]).margin(0.2));
  CHECK(x[0] < x[1]);
  CHECK(y[0] > y[1]);  // SVG's y axis points down.
  // One point or no panel must not divide by zero.
  CHECK(count_of(draw_log_log({{"one", {{"curve", {{64, 5}}}}}}, "y"), "nan") == 0);
  CHECK(draw_log_log({}, "y").ends_with("</svg>\n"));
}

TEST_CASE("the median is of whole batches, as many as were asked for", "[bench]") {
  CHECK(median({3}) == 3);
  CHECK(median({9, 1, 5}) == 5);
  CHECK(median({9, 1, 5, 7}) == 6);
  Alone alone;
  int calls = 0;
  const auto slow = [&] {
    ++calls;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  const double us = median_us(alone, slow, {.iterations = 9, .warmup = 3});
  CHECK(calls == 12);
  CHECK(alone.batches == 9);  // A call that is longer than a batch is timed alone.
  CHECK(us >= 1000);
  int quick_calls = 0;
  median_us(alone, [&] { ++quick_calls; }, {.iterations = 0, .warmup = 0});
  CHECK(alone.batches >= 5);
  CHECK(static_cast<std::size_t>(quick_calls) > 100 * alone.batches);
}

TEST_CASE("the bare loop of the limit sums into all buffers", "[bench]") {
  for (const int ranks : {2, 3, 8}) {
    CAPTURE(ranks);
    std::vector<std::vector<float>> memory(static_cast<std::size_t>(ranks), std::vector<float>(5000));
    std::vector<float*> buffers;
    for (int rank = 0; rank < ranks; ++rank) {
      buffers.push_back(memory[static_cast<std::size_t>(rank)].data());
      fill_input(rank, buffers.back(), 5000);
    }
    sum_into_all(buffers.data(), ranks, 0, 1234);
    sum_into_all(buffers.data(), ranks, 1234, 5000);
    for (int rank = 0; rank < ranks; ++rank)
      CHECK(count_wrong(find_collective("all_reduce"), {rank, ranks, 5000},
                        memory[static_cast<std::size_t>(rank)].data(), 5000) == 0);
  }
}

TEST_CASE("A bar chart shows each value from zero", "[bench]") {
  const std::vector<BarGroup> groups = {{"1 device", {{"a & b", 100}, {"c", 50}}}, {"2 devices", {{"a & b", 200}}}};
  const std::string svg = draw_bars("rates", "samples/s", groups);
  CHECK(svg.starts_with("<svg "));
  CHECK(count_of(svg, "<rect") == 1 + 3 + 2);  // Background, bars, legend.
  CHECK(count_of(svg, "a &amp; b") == 1);
  // Heights are proportional to the values.
  std::vector<double> heights;
  for (std::size_t at = svg.find("height=\""); at != std::string::npos; at = svg.find("height=\"", at + 1))
    heights.push_back(std::atof(svg.c_str() + at + 8));
  std::sort(heights.begin(), heights.end());
  CHECK(std::any_of(heights.begin(), heights.end(), [&](double h) {
    const auto has = [&](double x) {
      return std::any_of(heights.begin(), heights.end(), [&](double y) { return std::abs(x - y) < 0.2; });
    };
    return h > 20 && has(2 * h) && has(4 * h);
  }));
  CHECK(count_of(draw_bars("", "", {{"none", {{"a", 0}}}}), "nan") == 0);
  CHECK(count_of(draw_bars("", "", {}), "nan") == 0);
}
