// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace asr {

/// The characters that the model writes: space, apostrophe and a to z. Label 0 is CTC's blank.
class Alphabet {
 public:
  static constexpr std::int64_t kBlank = 0;

  std::int64_t size() const;  ///< Labels, the blank among them.

  /// Labels of a normalised text; empty where a character is none of the alphabet's.
  std::optional<std::vector<std::int64_t>> encode(const std::string& text) const;
  std::string decode(const std::vector<std::int64_t>& labels) const;
};

/// A transcript in the alphabet's writing: lower case, the usual marks of punctuation and hyphens as spaces, curly
/// apostrophes straight, single spaces. What else it holds (digits, letters with accents) stays, for encode() to
/// refuse: how a number is spoken is known to who made the transcript.
std::string normalise(const std::string& text);

/// The first character of a normalised text that is not in the alphabet, as a quoted text; empty when there is none.
std::string unknown_character(const std::string& text);

}  // namespace asr
