#include "clstm_ppo/prices.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>
#include <ddpkit/train/atomic_file.h>
#include <ddpkit/train/csv.h>
#include <ddpkit/train/text.h>

#include "data_files.h"

namespace clstm_ppo {
namespace {

using ddpkit::InvalidArgument;
using ddpkit::train::CsvRecord;
using ddpkit::train::in_quotes;

constexpr std::array<const char*, 6> kColumns = {"Date", "Open", "High", "Low", "Close", "Volume"};
constexpr const char* kExpectedGrowth = "ExpectedGrowth";
// Outside this range, products of ratios might overflow double.
constexpr double kLowestPrice = 1e-9, kHighestPrice = 1e12;
// Prices adjusted for splits and dividends are rounded independently.
constexpr double kRounding = 1e-6;

[[noreturn]] void fail(const std::filesystem::path& file, std::size_t line, const std::string& reason) {
  throw InvalidArgument(fmt::format("{}:{}: {}", file.string(), line, reason));
}

std::optional<double> parse_double(std::string_view text) {
  double value = 0;
  return ddpkit::parse_number(text, value) && std::isfinite(value) ? std::optional(value) : std::nullopt;
}

// Removes a number of exactly `digits` digits from the front of `text`.
std::optional<int> number(std::string_view& text, std::size_t digits) {
  int value = 0;
  if (text.size() < digits) return std::nullopt;
  for (const char c : text.substr(0, digits)) {
    if (c < '0' || c > '9') return std::nullopt;
    value = value * 10 + (c - '0');
  }
  text.remove_prefix(digits);
  return value;
}

bool skip(std::string_view& text, char wanted) {
  if (text.empty() || text.front() != wanted) return false;
  text.remove_prefix(1);
  return true;
}

std::optional<std::int64_t> parse_date(std::string_view text) {
  const auto year = number(text, 4);
  if (!year || !skip(text, '-')) return std::nullopt;
  const auto month = number(text, 2);
  if (!month || !skip(text, '-')) return std::nullopt;
  const auto day = number(text, 2);
  if (!day) return std::nullopt;
  const std::chrono::year_month_day date{std::chrono::year(*year), std::chrono::month(static_cast<unsigned>(*month)),
                                         std::chrono::day(static_cast<unsigned>(*day))};
  if (!date.ok()) return std::nullopt;
  std::int64_t seconds = std::int64_t{std::chrono::sys_days(date).time_since_epoch().count()} * 86400;
  if (text.empty()) return seconds;
  if (!skip(text, ' ') && !skip(text, 'T')) return std::nullopt;
  const auto hour = number(text, 2);
  if (!hour || *hour > 23 || !skip(text, ':')) return std::nullopt;
  const auto minute = number(text, 2);
  if (!minute || *minute > 59) return std::nullopt;
  seconds += *hour * 3600 + *minute * 60;
  if (text.empty()) return seconds;
  if (!skip(text, ':')) return std::nullopt;
  const auto second = number(text, 2);
  if (!second || *second > 59 || !text.empty()) return std::nullopt;
  return seconds + *second;
}

class Reader {
 public:
  explicit Reader(const std::filesystem::path& file) : file_(file), records_(ddpkit::train::read_csv(file)) {
    series_.name = file.stem().string();
  }

  PriceSeries read(std::size_t least) {
    if (records_.empty()) fail(file_, 1, fmt::format("is empty: its first line must be {}", fmt::join(kColumns, ",")));
    find_columns();
    for (std::size_t i = 1; i < records_.size(); ++i) read_row(records_[i]);
    if (series_.size() < least)
      fail(file_, records_.back().line,
           fmt::format("ends after {} row{} of prices: at least {} are needed", series_.size(),
                       series_.size() == 1 ? "" : "s", least));
    return std::move(series_);
  }

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  std::size_t find(const char* name) const {
    const std::vector<std::string>& header = records_.front().fields;
    const auto found = std::find(header.begin(), header.end(), name);
    if (found == header.end()) return kNone;
    if (std::find(found + 1, header.end(), name) != header.end())
      fail(file_, records_.front().line, fmt::format("the column {} occurs twice", name));
    return static_cast<std::size_t>(found - header.begin());
  }

  void find_columns() {
    const CsvRecord& header = records_.front();
    if (!header.fault.empty()) fail(file_, header.line, header.fault);
    for (std::size_t i = 0; i < kColumns.size(); ++i) {
      columns_[i] = find(kColumns[i]);
      if (columns_[i] == kNone)
        fail(file_, header.line,
             fmt::format("the column {} is missing: the first line must name {}", kColumns[i],
                         fmt::join(kColumns, ",")));
    }
    expected_ = find(kExpectedGrowth);
  }

  double price(const CsvRecord& row, std::size_t column, const char* name) const {
    const std::string& text = row.fields[column];
    const auto value = parse_double(text);
    if (!value || *value < kLowestPrice || *value > kHighestPrice)
      fail(file_, row.line,
           fmt::format("{} is {}: a price must be a number above 0 (1e-9 to 1e12)", name, in_quotes(text)));
    return *value;
  }

  void read_row(const CsvRecord& row) {
    if (!row.fault.empty()) fail(file_, row.line, row.fault);
    if (row.fields.size() != records_.front().fields.size())
      fail(
          file_, row.line,
          fmt::format("has {} fields, but the first line names {}", row.fields.size(), records_.front().fields.size()));
    const std::string& date = row.fields[columns_[0]];
    const auto time = parse_date(date);
    if (!time)
      fail(file_, row.line, fmt::format("Date is {}: must be YYYY-MM-DD or YYYY-MM-DD HH:MM:SS", in_quotes(date)));
    if (series_.size() > 0 && *time <= series_.times.back())
      fail(file_, row.line,
           *time == series_.times.back()
               ? fmt::format("the date {} occurs twice", date)
               : fmt::format("{} comes after {}: dates must ascend", date, series_.dates.back()));
    series_.times.push_back(*time);
    series_.dates.push_back(date);
    series_.open.push_back(price(row, columns_[1], "Open"));
    series_.high.push_back(price(row, columns_[2], "High"));
    series_.low.push_back(price(row, columns_[3], "Low"));
    series_.close.push_back(price(row, columns_[4], "Close"));
    const double high = series_.high.back(), low = series_.low.back();
    if (high < low) fail(file_, row.line, fmt::format("High {} is below Low {}", high, low));
    for (const auto& [name, value] :
         {std::pair("Open", series_.open.back()), std::pair("Close", series_.close.back())}) {
      if (value > high * (1 + kRounding) || value < low * (1 - kRounding))
        fail(file_, row.line, fmt::format("{} {} is outside of Low {} to High {}", name, value, low, high));
    }
    const auto volume = parse_double(row.fields[columns_[5]]);
    if (!volume || *volume < 0)
      fail(file_, row.line,
           fmt::format("Volume is {}: must be a number, 0 or more", in_quotes(row.fields[columns_[5]])));
    series_.volume.push_back(*volume);
    if (expected_ != kNone) series_.expected_growth.push_back(price(row, expected_, kExpectedGrowth));
  }

  std::filesystem::path file_;
  std::vector<CsvRecord> records_;
  PriceSeries series_;
  std::array<std::size_t, kColumns.size()> columns_{};
  std::size_t expected_ = kNone;
};

}  // namespace

PriceSeries read_prices(const std::filesystem::path& file, std::size_t least) { return Reader(file).read(least); }

std::vector<PriceSeries> read_price_folder(const std::filesystem::path& folder, const std::vector<std::string>& assets,
                                           std::size_t least) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error))
    throw InvalidArgument(
        std::filesystem::exists(folder, error)
            ? fmt::format("{} is not a folder: name its folder, and choose its assets with --assets", folder.string())
            : fmt::format("there is no folder {}", folder.string()));
  std::vector<std::string> names = assets;
  if (names.empty()) {
    for (const std::filesystem::path& path : data_files::entries(folder)) {
      const std::string name = data_files::without_ending(path.filename().string(), ".csv");
      if (!name.empty()) names.push_back(name);
    }
    if (names.empty()) throw InvalidArgument(fmt::format("{} holds no .csv file", folder.string()));
    std::sort(names.begin(), names.end());
  }
  std::vector<PriceSeries> all;
  for (const std::string& name : names) {
    if (std::count(names.begin(), names.end(), name) > 1)
      throw InvalidArgument(fmt::format("the asset {} is named twice", name));
    all.push_back(read_prices(data_files::in_any_case(folder / (name + ".csv")), least));
  }
  return all;
}

std::vector<PriceSeries> joined(const std::vector<PriceSeries>& series, std::size_t least) {
  std::vector<std::int64_t> common = series.front().times;
  for (const PriceSeries& one : series) {
    std::vector<std::int64_t> both;
    std::set_intersection(common.begin(), common.end(), one.times.begin(), one.times.end(), std::back_inserter(both));
    common = std::move(both);
  }
  if (common.size() < least) {
    std::vector<std::string> names;
    for (const PriceSeries& one : series) names.push_back(one.name);
    throw InvalidArgument(fmt::format("{} have only {} dates in common: at least {} are needed; choose with --assets",
                                      fmt::join(names, ", "), common.size(), least));
  }
  std::vector<PriceSeries> result;
  for (const PriceSeries& one : series) {
    PriceSeries& kept = result.emplace_back();
    kept.name = one.name;
    kept.times = common;
    std::size_t bar = 0;
    for (const std::int64_t time : common) {
      while (one.times[bar] != time) ++bar;
      kept.dates.push_back(one.dates[bar]);
      kept.open.push_back(one.open[bar]);
      kept.high.push_back(one.high[bar]);
      kept.low.push_back(one.low[bar]);
      kept.close.push_back(one.close[bar]);
      kept.volume.push_back(one.volume[bar]);
    }
    // Growth to the next bar is valid only if no bar was removed.
    if (common.size() == one.size()) kept.expected_growth = one.expected_growth;
  }
  return result;
}

void write_prices(const std::filesystem::path& file, const PriceSeries& series) {
  const bool planted = !series.expected_growth.empty();
  std::string text = fmt::format("{}{}\n", fmt::join(kColumns, ","), planted ? std::string(",") + kExpectedGrowth : "");
  for (std::size_t i = 0; i < series.size(); ++i) {
    text += fmt::format("{},{:.6f},{:.6f},{:.6f},{:.6f},{:.0f}", series.dates[i], series.open[i], series.high[i],
                        series.low[i], series.close[i], series.volume[i]);
    text += planted ? fmt::format(",{:.9f}\n", series.expected_growth[i]) : "\n";
  }
  ddpkit::train::AtomicFile out(file);
  out.write(text.data(), text.size());
  out.commit();
}

}  // namespace clstm_ppo
