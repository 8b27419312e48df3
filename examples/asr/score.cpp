#include "asr/score.h"

#include <sstream>

namespace asr {

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

void ErrorCounts::add(const std::string& truth, const std::string& heard) {
  const std::vector<std::string> said = words_of(truth);
  utterances += 1;
  characters += static_cast<double>(truth.size());
  character_edits += static_cast<double>(edit_distance(truth, heard));
  words += static_cast<double>(said.size());
  word_edits += static_cast<double>(edit_distance(said, words_of(heard)));
}

}  // namespace asr
