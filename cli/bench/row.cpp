#include "row.h"

#include <charconv>
#include <vector>

#include <fmt/format.h>

#include "collective.h"

namespace ddpkit::bench {
namespace {

constexpr std::string_view kTableFormat = "{:<14} {:<8} {:>5} {:>12} {:<9} {:>12} {:>11} {:>11} {:>7}";

template <class Number>
bool parse(std::string_view text, Number& number) {
  const auto [stop, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  return status == std::errc{} && stop == text.data() + text.size();
}

/// Three digits even of what is slow.
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
  const bool numbers = parse(fields[2], row.ranks) && parse(fields[3], row.bytes) && parse(fields[5], row.us) &&
                       parse(fields[8], row.wrong);
  if (!numbers) return std::nullopt;
  for (const Collective& known : collectives()) {
    if (known.name == row.collective) return row;
  }
  return std::nullopt;
}

std::string table_header() {
  return fmt::format(kTableFormat, "# collective", "backend", "ranks", "bytes", "memory", "time", "algbw", "busbw",
                     "#wrong") +
         '\n' + fmt::format(kTableFormat, "#", "", "", "", "", "us", "GB/s", "GB/s", "");
}

std::string table_row(const Row& row) {
  return fmt::format(kTableFormat, row.collective, row.backend, row.ranks, row.bytes, row.memory,
                     fmt::format("{:.2f}", row.us), format_GBps(row.algbw_GBps()), format_GBps(row.busbw_GBps()),
                     row.wrong);
}

}  // namespace ddpkit::bench
