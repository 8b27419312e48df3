// Tier 0: the standard library only. Texts, and the text output of programs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ddpkit::train {

/// Formats `text` for an error message: in quotes, shortened to 40 characters, without control characters.
std::string in_quotes(std::string_view text);

/// Returns the smallest number of insertions, deletions and substitutions that convert `a` to `b` (Levenshtein 1966).
template <class Sequence>
std::size_t edit_distance(const Sequence& a, const Sequence& b) {
  std::vector<std::size_t> row(b.size() + 1);  // Distances of the first i elements of a. [elements of b]
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

/// Prints a line to stdout and flushes. Does not throw if stdout is full: run_main() reports it at the end.
void print_line(const std::string& line);

/// Prints a line to stderr. Ignores errors.
void log_line(const std::string& line) noexcept;

}  // namespace ddpkit::train
