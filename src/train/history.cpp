#include "train/history.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>
#include <ddpkit/train/atomic_file.h>
#include <ddpkit/train/csv.h>
#include <ddpkit/train/svg.h>
#include <ddpkit/train/text.h>

namespace ddpkit::train {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

template <class Number>
Number parsed(const CsvRecord& record, std::size_t column) {
  Number number{};
  if (column >= record.fields.size() || !parse_number(record.fields[column], number))
    throw InvalidArgument(fmt::format("line {}, column {}: is no number", record.line, column + 1));
  return number;
}

}  // namespace

void History::load(std::int64_t step) {
  const std::filesystem::path path = folder_ / "metrics.csv";
  if (!std::filesystem::exists(path)) return;
  try {
    const std::vector<CsvRecord> records = read_csv(path);
    if (records.empty() || records.front().fields.size() < 2) throw InvalidArgument("the first line is missing");
    tags_.assign(records.front().fields.begin() + 2, records.front().fields.end());
    for (auto record = records.begin() + 1; record != records.end(); ++record) {
      Row row{.epoch = parsed<std::int64_t>(*record, 0), .step = parsed<std::int64_t>(*record, 1), .values = {}};
      for (std::size_t column = 2; column < record->fields.size(); ++column)
        row.values.push_back(record->fields[column].empty() ? kNone : parsed<double>(*record, column));
      if (row.values.size() > tags_.size()) throw InvalidArgument(fmt::format("line {} is too long", record->line));
      if (row.step <= step) rows_.push_back(std::move(row));
    }
  } catch (const Error& error) {
    log_line(fmt::format("{}: {}; the curves start again", path.string(), error.what()));
    tags_.clear();
    rows_.clear();
  }
}

void History::add(std::int64_t epoch, std::int64_t step, const std::vector<std::pair<std::string, double>>& values,
                  const std::string& x_name) {
  Row row{.epoch = epoch, .step = step, .values = std::vector<double>(tags_.size(), kNone)};
  for (const auto& [tag, value] : values) {
    const auto column = static_cast<std::size_t>(std::find(tags_.begin(), tags_.end(), tag) - tags_.begin());
    if (column == tags_.size()) {
      tags_.push_back(tag);
      row.values.push_back(kNone);
    }
    row.values[column] = value;
  }
  rows_.push_back(std::move(row));
  write_text(folder_ / "metrics.csv", table());
  write_text(folder_ / "curves.svg", curves(x_name));
}

std::string History::table() const {
  std::string text = "epoch,step";
  for (const std::string& tag : tags_) text += "," + csv_field(tag);
  for (const Row& row : rows_) {
    text += fmt::format("\n{},{}", row.epoch, row.step);
    for (std::size_t column = 0; column < tags_.size(); ++column)
      text +=
          column < row.values.size() && !std::isnan(row.values[column]) ? fmt::format(",{}", row.values[column]) : ",";
  }
  return text + "\n";
}

// A chart for each group: the part of a tag before '/'. The group "training" shows the learning rate only, as its
// other values have other units.
std::string History::curves(const std::string& x_name) const {
  constexpr double kWidth = 560, kHeight = 280;
  std::vector<svg::Chart> charts;
  for (std::size_t column = 0; column < tags_.size(); ++column) {
    const std::size_t slash = tags_[column].find('/');
    std::string group = tags_[column].substr(0, slash),
                name = slash == std::string::npos ? group : tags_[column].substr(slash + 1);
    if (group == "training" && name != "lr") continue;
    if (group == "training") group = "learning rate";
    svg::Series series{.name = name, .x = {}, .y = {}};
    for (const Row& row : rows_) {
      series.x.push_back(static_cast<double>(row.epoch));
      series.y.push_back(column < row.values.size() ? row.values[column] : kNone);
    }
    const std::string title = fmt::format("{} by {}", group, x_name);
    auto chart = std::find_if(charts.begin(), charts.end(), [&](const svg::Chart& c) { return c.title == title; });
    if (chart == charts.end()) chart = charts.insert(chart, {.title = title, .series = {}});
    chart->series.push_back(std::move(series));
  }
  std::string body;
  for (std::size_t i = 0; i < charts.size(); ++i)
    body += svg::chart(charts[i], static_cast<double>(i % 2) * kWidth, static_cast<double>(i / 2) * kHeight, kWidth,
                       kHeight);
  return svg::document((charts.size() > 1 ? 2 : 1) * kWidth, static_cast<double>((charts.size() + 1) / 2) * kHeight,
                       body);
}

}  // namespace ddpkit::train
