// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace gpt {

/// Text as numbers of characters.
struct Corpus {
  std::string name;        ///< Of its file or folder.
  std::string vocabulary;  ///< All bytes that occur, in ascending order.
  at::Tensor train;        ///< int64, one number per character.
  at::Tensor validation;   ///< The last tenth of the text.

  std::int64_t tokens() const { return static_cast<std::int64_t>(vocabulary.size()); }
  /// Returns the numbers of the characters. Skips characters that are not in the vocabulary. [character]
  at::Tensor encode(const std::string& text) const;
  char decode(std::int64_t number) const { return vocabulary.at(static_cast<std::size_t>(number)); }
};

/// Reads a text file, or all plain files of a folder in the order of their names, without links. Throws InvalidArgument
/// if there are none, or fewer than 10 * `context` characters.
Corpus read_corpus(const std::string& path, std::int64_t context);

}  // namespace gpt
