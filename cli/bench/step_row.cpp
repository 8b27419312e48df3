#include "step_row.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/parse_number.h>

#include "timing.h"

namespace ddpkit::bench {
namespace {

constexpr std::string_view kStepRowFormat =
    "{:<22} {:<12} {:>9} {:>5} {:>5} {:<9} {:<7} {:>7} {:>10} {:>7} {:>10} {:>9} {:>8} {:>8} {:>6}";

std::vector<std::string_view> split(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(at, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

bool parse_list(std::string_view text, std::vector<double>& numbers) {
  if (text.empty()) return true;
  for (const std::string_view part : split(text, ',')) {
    if (!parse_number(part, numbers.emplace_back())) return false;
  }
  return true;
}

/// [step]
std::vector<double> times_together(const std::vector<StepTurn>& turns) {
  std::vector<double> now;  // [rank]
  for (const StepTurn& turn : turns) now.push_back(turn.start_us);
  double before = *std::max_element(now.begin(), now.end());
  std::vector<double> us;
  for (std::size_t step = 0; step < turns[0].us.size(); ++step) {
    for (std::size_t rank = 0; rank < turns.size(); ++rank) now[rank] += turns[rank].us.at(step);
    const double over = *std::max_element(now.begin(), now.end());
    us.push_back(over - before);
    before = over;
  }
  return us;
}

std::string megabytes(std::uint64_t bytes) { return fmt::format("{:.2f}", static_cast<double>(bytes) / 1e6); }

}  // namespace

std::string to_report(const StepTurn& turn) {
  return fmt::format("{}turn {:.3f} {:.3f} {:.3f}", kStepReport, turn.start_us, fmt::join(turn.us, ","),
                     fmt::join(turn.exposed_us, ","));
}

std::string to_report(const StepEnd& end) {
  return fmt::format("{}end {} {} {} {} {} {}", kStepReport, end.params, end.buckets, end.reduced_bytes, end.peak_bytes,
                     end.wrong, end.memory_bytes);
}

std::optional<StepTurn> parse_step_turn(std::string_view text) {
  if (!text.starts_with(kStepReport)) return std::nullopt;
  const auto fields = split(text.substr(kStepReport.size()), ' ');
  StepTurn turn;
  if (fields.size() != 4 || fields[0] != "turn" || !parse_number(fields[1], turn.start_us) ||
      !parse_list(fields[2], turn.us) || !parse_list(fields[3], turn.exposed_us) || turn.us.empty())
    return std::nullopt;
  return turn;
}

std::optional<StepEnd> parse_step_end(std::string_view text) {
  if (!text.starts_with(kStepReport)) return std::nullopt;
  const auto fields = split(text.substr(kStepReport.size()), ' ');
  StepEnd end;
  // Ranks of Python omit the last field.
  if ((fields.size() != 6 && fields.size() != 7) || fields[0] != "end" || !parse_number(fields[1], end.params) ||
      !parse_number(fields[2], end.buckets) || !parse_number(fields[3], end.reduced_bytes) ||
      !parse_number(fields[4], end.peak_bytes) || !parse_number(fields[5], end.wrong) ||
      (fields.size() == 7 && !parse_number(fields[6], end.memory_bytes)))
    return std::nullopt;
  return end;
}

void StepSeries::add_turn(const std::vector<StepTurn>& turns, bool together) {
  std::vector<double> us;
  for (const StepTurn& turn : turns) {
    exposed_us_.insert(exposed_us_.end(), turn.exposed_us.begin(), turn.exposed_us.end());
    if (!together) us.insert(us.end(), turn.us.begin(), turn.us.end());
  }
  if (together) us = times_together(turns);
  us_.insert(us_.end(), us.begin(), us.end());
  round_us_.push_back(median(std::move(us)));
}

double StepSeries::us() const { return median(us_); }

std::optional<double> StepSeries::exposed_us() const {
  if (exposed_us_.empty()) return std::nullopt;
  return median(exposed_us_);
}

double StepSeries::ratio_to(const StepSeries& alone) const {
  std::vector<double> ratios;
  for (std::size_t round = 0; round < std::min(round_us_.size(), alone.round_us_.size()); ++round)
    ratios.push_back(round_us_[round] / alone.round_us_[round]);
  return median(std::move(ratios));
}

StepEnd over_ranks(const std::vector<StepEnd>& ends) {
  StepEnd all;
  for (const StepEnd& end : ends) {
    all.params = std::max(all.params, end.params);
    all.buckets = std::max(all.buckets, end.buckets);
    all.reduced_bytes = std::max(all.reduced_bytes, end.reduced_bytes);
    all.peak_bytes = std::max(all.peak_bytes, end.peak_bytes);
    all.memory_bytes = std::max(all.memory_bytes, end.memory_bytes);
    all.wrong += end.wrong;
  }
  return all;
}

std::string to_csv(const StepRow& row) {
  return fmt::format("{},{},{},{},{:.3f},{:.4f},{},{},{},{},{},{},{},{},{}", row.system, row.end.params, row.batch,
                     row.ranks, row.us, row.ratio_to_alone, row.model, row.optimizer, row.bucket_cap_mb,
                     row.end.buckets, row.exposed_us ? fmt::format("{:.3f}", *row.exposed_us) : "",
                     row.end.reduced_bytes, row.end.peak_bytes, row.end.wrong, row.end.memory_bytes);
}

std::string step_table_header() {
  return fmt::format(kStepRowFormat, "# system", "model", "params", "batch", "ranks", "optimizer", "cap", "buckets",
                     "time", "ratio", "exposed", "reduced", "peak", "memory", "#wrong") +
         '\n' + fmt::format(kStepRowFormat, "#", "", "", "", "", "", "MiB", "", "ms", "", "ms", "MB", "MB", "MB", "");
}

std::string table_row(const StepRow& row) {
  return fmt::format(
      kStepRowFormat, row.system, row.model, row.end.params, row.batch, row.ranks, row.optimizer,
      row.bucket_cap_mb.empty() ? "-" : row.bucket_cap_mb, row.end.buckets > 0 ? std::to_string(row.end.buckets) : "-",
      fmt::format("{:.3f}", row.us / 1e3), fmt::format("{:.3f}", row.ratio_to_alone),
      row.exposed_us ? fmt::format("{:.3f}", *row.exposed_us / 1e3) : "-",
      row.end.reduced_bytes > 0 ? megabytes(row.end.reduced_bytes) : "-",
      fmt::format("{:.0f}", static_cast<double>(row.end.peak_bytes) / 1e6),
      row.end.memory_bytes > 0 ? fmt::format("{:.1f}", static_cast<double>(row.end.memory_bytes) / 1e6) : "-",
      row.end.wrong);
}

}  // namespace ddpkit::bench
