// Errors in price files: file, line, reason.
#include <cmath>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "clstm_ppo/generate.h"
#include "clstm_ppo/market.h"
#include "clstm_ppo/prices.h"
#include "support/catch.h"
#include "support/folder.h"

using namespace clstm_ppo;
using ddpkit::testing::Folder;
using ddpkit::testing::write_file;

namespace {

const std::string kHeader = "Date,Open,High,Low,Close,Volume\n";
const std::string kFirst = "2024-01-02,10,11,9,10.5,1000\n";

}  // namespace

TEST_CASE("prices that are wrong are named with file, line and reason", "[clstm_ppo]") {
  const Folder folder;
  const auto file = folder / "X.csv";
  for (const auto& [text, line, reason] : std::vector<std::tuple<std::string, int, std::string>>{
           {"", 1, "is empty: its first line must be Date,Open,High,Low,Close,Volume"},
           {"Date,Open,High,Low,Volume\n" + kFirst, 1, "the column Close is missing"},
           {"Date,Open,High,Low,Close,Close,Volume\n", 1, "the column Close occurs twice"},
           {"\"Date,Open\n", 1, "a quote is never closed"},
           {kHeader, 1, "ends after 0 rows of prices: at least 2 are needed"},
           {kHeader + kFirst, 2, "ends after 1 row of prices: at least 2 are needed"},
           {kHeader + kFirst + "2024-01-01,10,11,9,10,1\n", 3, "2024-01-01 comes after 2024-01-02: dates must ascend"},
           {kHeader + kFirst + "2024-01-02,10,11,9,10,1\n", 3, "the date 2024-01-02 occurs twice"},
           {kHeader + kFirst + "2024-01-02 00:00,10,11,9,10,1\n", 3, "the date 2024-01-02 00:00 occurs twice"},
           {kHeader + kFirst + "2024-02-30,10,11,9,10,1\n", 3, "Date is '2024-02-30'"},
           {kHeader + kFirst + "3 Jan 2024,10,11,9,10,1\n", 3, "Date is '3 Jan 2024'"},
           {kHeader + kFirst + "2024-01-03 25:00,10,11,9,10,1\n", 3, "Date is '2024-01-03 25:00'"},
           {kHeader + kFirst + ",10,11,9,10,1\n", 3, "Date is ''"},
           {kHeader + kFirst + "2024-01-03,10,11,9,NaN,1\n", 3, "Close is 'NaN': a price must be a number above 0"},
           {kHeader + kFirst + "2024-01-03,nan,11,9,10,1\n", 3, "Open is 'nan'"},
           {kHeader + kFirst + "2024-01-03,10,inf,9,10,1\n", 3, "High is 'inf'"},
           {kHeader + kFirst + "2024-01-03,10,1e400,9,10,1\n", 3, "High is '1e400'"},
           {kHeader + kFirst + "2024-01-03,10,11,-9,10,1\n", 3, "Low is '-9'"},
           {kHeader + kFirst + "2024-01-03,10,11,9,0,1\n", 3, "Close is '0'"},
           {kHeader + kFirst + "2024-01-03,10,11,9,1e-300,1\n", 3, "Close is '1e-300'"},
           {kHeader + kFirst + "2024-01-03,10,11,9,,1\n", 3, "Close is ''"},
           {kHeader + kFirst + "2024-01-03,10,11,9,ten,1\n", 3, "Close is 'ten'"},
           {kHeader + kFirst + "2024-01-03,10,11,9,10.5x,1\n", 3, "Close is '10.5x'"},
           {kHeader + kFirst + "2024-01-03,10,9,11,10,1\n", 3, "High 9 is below Low 11"},
           {kHeader + kFirst + "2024-01-03,10,11,9,10,-1\n", 3, "Volume is '-1': must be a number, 0 or more"},
           {kHeader + kFirst + "2024-01-03,10,11,9,10\n", 3, "has 5 fields, but the first line names 6"},
           {kHeader + kFirst + "\n\n2024-01-03,10,11,9,10,\"x\n", 5, "a quote is never closed"}}) {
    CAPTURE(text);
    write_file(file, text);
    CHECK_THROWS_AS(read_prices(file), ddpkit::InvalidArgument);
    CHECK_THROWS_WITH(read_prices(file),
                      ContainsSubstring(fmt::format("{}:{}: ", file.string(), line)) && ContainsSubstring(reason));
  }
  CHECK_THROWS_WITH(read_prices(folder / "none.csv"), ContainsSubstring("there is no file"));
  CHECK_THROWS_WITH(read_price_folder(folder / "none", {}), ContainsSubstring("there is no folder"));
  CHECK_THROWS_WITH(read_price_folder(folder.path(), {"X", "X"}), ContainsSubstring("named twice"));
  std::filesystem::remove(file);
  CHECK_THROWS_WITH(read_price_folder(folder.path(), {}), ContainsSubstring("holds no .csv file"));
}

TEST_CASE("prices are read unchanged", "[clstm_ppo]") {
  const Folder folder;
  write_file(folder / "B.csv",
             "\xEF\xBB\xBFVolume,Close,Low,High,Open,Date,Note\r\n7,10.5,9,11,10,2024-01-02 09:30:15,\"a, b\"\r\n"
             "8,1e1,9,11,10,2024-01-02T10:30,\r\n");
  const PriceSeries series = read_prices(folder / "B.csv");
  CHECK(series.name == "B");
  CHECK(series.close == std::vector<double>{10.5, 10});
  CHECK(series.volume == std::vector<double>{7, 8});
  CHECK(series.times[1] - series.times[0] == 3600 - 15);
  CHECK(series.expected_growth.empty());
}

TEST_CASE("several assets are joined on the days that all have", "[clstm_ppo]") {
  const Folder folder;
  write_file(folder / "A.csv", kHeader + "2024-01-01,1,1,1,1,1\n2024-01-02,2,2,2,2,1\n2024-01-04,4,4,4,4,1\n");
  write_file(folder / "B.csv",
             kHeader + "2024-01-02,20,20,20,20,1\n2024-01-03,30,30,30,30,1\n2024-01-04,40,40,40,40,1\n");
  const auto both = joined(read_price_folder(folder.path(), {}));
  REQUIRE(both.size() == 2);
  CHECK(both[0].dates == std::vector<std::string>{"2024-01-02", "2024-01-04"});
  CHECK(both[0].close == std::vector<double>{2, 4});
  CHECK(both[1].close == std::vector<double>{20, 40});
  CHECK_THROWS_WITH(joined(both, 3), ContainsSubstring("A, B have only 2 dates in common: at least 3 are needed"));
}

TEST_CASE("a synthetic market is the same from file and from memory, and has the specified pattern", "[clstm_ppo]") {
  const Folder folder;
  const GenerateOptions options{.assets = 2, .days = 6000, .seed = 4};
  generate(folder / "set", options);
  CHECK_THROWS_WITH(generate(folder / "set", options), ContainsSubstring("exists and is not an empty folder"));
  const auto series = generate_prices(options);
  const auto read = joined(read_price_folder(folder / "set", {}));
  REQUIRE(read.size() == 2);
  for (std::size_t asset = 0; asset < 2; ++asset) {
    CHECK(read[asset].times == series[asset].times);
    CHECK(read[asset].close.back() == Approx(series[asset].close.back()).epsilon(1e-6));
    double surprise = 0, squares = 0;
    for (std::size_t day = 0; day + 1 < read[asset].size(); ++day) {
      const double rest =
          std::log(read[asset].close[day + 1] / read[asset].close[day]) - std::log(read[asset].expected_growth[day]);
      surprise += rest / 5999;
      squares += rest * rest / 5999;
    }
    CHECK(std::sqrt(squares) == Approx(options.noise).epsilon(0.05));
    CHECK(std::abs(surprise) < 4 * options.noise / std::sqrt(5999));
  }
}

TEST_CASE("shuffled prices keep every move and the ends of both parts, and no pattern", "[clstm_ppo]") {
  const auto series = generate_prices({.assets = 2, .days = 3000, .seed = 1});
  const auto mixed = shuffled(series, 0.8, 7);
  for (std::size_t asset = 0; asset < 2; ++asset) {
    CHECK(mixed[asset].expected_growth.empty());
    CHECK(mixed[asset].close[2399] == Approx(series[asset].close[2399]));
    CHECK(mixed[asset].close.back() == Approx(series[asset].close.back()));
    const auto correlation = [](const std::vector<double>& close) {
      double product = 0, squares = 0;
      for (std::size_t day = 2; day < close.size(); ++day) {
        const double now = std::log(close[day] / close[day - 1]), before = std::log(close[day - 1] / close[day - 2]);
        product += now * before;
        squares += now * now;
      }
      return product / squares;
    };
    CHECK(correlation(series[asset].close) > 0.3);
    CHECK(std::abs(correlation(mixed[asset].close)) < 0.08);
    for (std::size_t day = 0; day < 3000; ++day) {
      CHECK(mixed[asset].low[day] <= mixed[asset].close[day]);
      CHECK(mixed[asset].close[day] <= mixed[asset].high[day]);
    }
  }
}
