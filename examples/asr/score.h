// Tier 0: the standard library only.
#pragma once

#include <string>
#include <vector>

namespace asr {

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
