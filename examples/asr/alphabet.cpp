#include "asr/alphabet.h"

#include <string_view>

#include <fmt/format.h>

#include <ddpkit/train/text.h>

namespace asr {
namespace {

constexpr std::string_view kCharacters = " 'abcdefghijklmnopqrstuvwxyz";

// Returns the number of bytes of the UTF-8 character that begins with `lead`.
std::size_t length_of(unsigned char lead) { return lead < 0xc0 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4; }

}  // namespace

std::int64_t Alphabet::size() const { return static_cast<std::int64_t>(kCharacters.size()) + 1; }

std::optional<std::vector<std::int64_t>> Alphabet::encode(const std::string& text) const {
  std::vector<std::int64_t> labels;
  labels.reserve(text.size());
  for (const char c : text) {
    const std::size_t at = kCharacters.find(c);
    if (at == std::string_view::npos) return std::nullopt;
    labels.push_back(static_cast<std::int64_t>(at) + 1);
  }
  return labels;
}

std::string Alphabet::decode(const std::vector<std::int64_t>& labels) const {
  std::string text;
  for (const std::int64_t label : labels) {
    if (label != kBlank) text += kCharacters.at(static_cast<std::size_t>(label - 1));
  }
  return text;
}

std::string normalise(const std::string& text) {
  constexpr std::string_view kMarks = ".,;:!?\"()[]{}<>-_/\t\n\r\v\f";
  std::string result;
  const auto add = [&](std::string_view piece) {
    if (piece != " " || (!result.empty() && result.back() != ' ')) result += piece;
  };
  for (std::size_t i = 0; i < text.size();) {
    const std::string_view character = std::string_view(text).substr(i, length_of(static_cast<unsigned char>(text[i])));
    i += character.size();
    const char c = character[0];
    if (character == "\u2019" || character == "\u2018") {
      add("'");
    } else if (character == "\u2013" || character == "\u2014" || character == "\u2026" || character == "\u201c" ||
               character == "\u201d" || (character.size() == 1 && kMarks.find(c) != std::string_view::npos)) {
      add(" ");
    } else if (c >= 'A' && c <= 'Z') {
      result += static_cast<char>(c - 'A' + 'a');
    } else {
      add(character);
    }
  }
  if (!result.empty() && result.back() == ' ') result.pop_back();
  return result;
}

std::string unknown_character(const std::string& text) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (kCharacters.find(text[i]) == std::string_view::npos)
      return ddpkit::train::in_quotes(text.substr(i, length_of(static_cast<unsigned char>(text[i]))));
  }
  return {};
}

}  // namespace asr
