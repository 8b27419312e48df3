// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace asr {

/// The characters that the model writes: space, apostrophe and a to z. Label 0 is the blank of CTC.
class Alphabet {
 public:
  static constexpr std::int64_t kBlank = 0;

  std::int64_t size() const;  ///< Number of labels, including the blank.

  /// Returns the labels of a normalised text. Returns nothing if a character is not in the alphabet.
  std::optional<std::vector<std::int64_t>> encode(const std::string& text) const;
  std::string decode(const std::vector<std::int64_t>& labels) const;
};

/// Normalises a transcript: lower case, usual punctuation and hyphens as spaces, straight apostrophes, single spaces.
/// Other characters (digits, letters with accents) remain, and encode() rejects them: only the author of the transcript
/// knows how a number is spoken.
std::string normalise(const std::string& text);

/// Returns the first character of a normalised text that is not in the alphabet, in quotes. Returns an empty string if
/// there is none.
std::string unknown_character(const std::string& text);

}  // namespace asr
