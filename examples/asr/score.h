// Tier 0: the standard library only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace asr {

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

/// Splits a text at spaces.
std::vector<std::string> words_of(const std::string& text);

/// Sums of the errors in transcripts. The rates weight each utterance by its length.
struct ErrorCounts {
  double utterances = 0;
  double characters = 0, character_edits = 0;
  double words = 0, word_edits = 0;

  void add(const std::string& reference, const std::string& hypothesis);
  double cer() const { return character_edits / characters; }  ///< Character error rate; above 1 is possible.
  double wer() const { return word_edits / words; }            ///< Word error rate.
};

}  // namespace asr
