#include "row.h"

#include <vector>

#include <fmt/format.h>

#include <ddpkit/parse_number.h>

#include "collective.h"

namespace ddpkit::bench {
namespace {

constexpr std::string_view kRowFormat = "{:<14} {:<8} {:>5} {:>12} {:<9} {:>12} {:>11} {:>11} {:>7}";

/// Five decimals below 0.1 keep three significant digits.
std::string format_GBps(double value) { return fmt::format("{:.{}f}", value, value < 0.1 ? 5 : 3); }

}  // namespace

double Row::algbw_GBps() const { return us > 0 ? static_cast<double>(bytes) / us / 1e3 : 0; }

double Row::busbw_GBps() const { return algbw_GBps() * find_collective(collective).bus_factor(ranks); }

std::string to_csv(const Row& row) {
  return fmt::format("{},{},{},{},{},{:.4f},{:.6f},{:.6f}", row.collective, row.backend, row.ranks, row.bytes,
                     row.memory, row.us, row.algbw_GBps(), row.busbw_GBps());
}

std::string to_report(const Row& row) { return fmt::format("{},{}", to_csv(row), row.wrong); }

std::optional<Row> parse_report(std::string_view line) {
  std::vector<std::string_view> fields;
  for (std::size_t at = 0; at <= line.size();) {
    const std::size_t comma = std::min(line.find(',', at), line.size());
    fields.push_back(line.substr(at, comma - at));
    at = comma + 1;
  }
  if (fields.size() != 9) return std::nullopt;
  Row row{.collective = std::string(fields[0]), .backend = std::string(fields[1]), .memory = std::string(fields[4])};
  const bool numbers = parse_number(fields[2], row.ranks) && parse_number(fields[3], row.bytes) &&
                       parse_number(fields[5], row.us) && parse_number(fields[8], row.wrong);
  if (!numbers) return std::nullopt;
  for (const Collective& known : collectives()) {
    if (known.name == row.collective) return row;
  }
  return std::nullopt;
}

std::string table_header() {
  return fmt::format(kRowFormat, "# collective", "backend", "ranks", "bytes", "memory", "time", "algbw", "busbw",
                     "#wrong") +
         '\n' + fmt::format(kRowFormat, "#", "", "", "", "", "us", "GB/s", "GB/s", "");
}

std::string table_row(const Row& row) {
  return fmt::format(kRowFormat, row.collective, row.backend, row.ranks, row.bytes, row.memory,
                     fmt::format("{:.2f}", row.us), format_GBps(row.algbw_GBps()), format_GBps(row.busbw_GBps()),
                     row.wrong);
}

}  // namespace ddpkit::bench
