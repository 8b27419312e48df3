#include "asr/score.h"

#include <sstream>

#include <ddpkit/train/text.h>

namespace asr {

using ddpkit::train::edit_distance;

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

void ErrorCounts::add(const std::string& reference, const std::string& hypothesis) {
  const std::vector<std::string> reference_words = words_of(reference);
  utterances += 1;
  characters += static_cast<double>(reference.size());
  character_edits += static_cast<double>(edit_distance(reference, hypothesis));
  words += static_cast<double>(reference_words.size());
  word_edits += static_cast<double>(edit_distance(reference_words, words_of(hypothesis)));
}

}  // namespace asr
