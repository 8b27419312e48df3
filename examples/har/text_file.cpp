#include "har/text_file.h"

#include <cmath>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>

#include "data_files.h"

namespace har {
namespace {

constexpr std::string_view kBlanks = " \t\r\v\f";

template <class T>
std::optional<T> parse(std::string_view text) {
  T value{};
  return ddpkit::parse_number(text, value) ? std::optional(value) : std::nullopt;
}

}  // namespace

TextFile::TextFile(const std::filesystem::path& path)
    : path_(data_files::in_any_case(path)), text_(data_files::read_text(path_)) {}

std::optional<std::string_view> TextFile::next_line() {
  while (position_ < text_.size()) {
    const std::size_t end = std::min(text_.find('\n', position_), text_.size());
    const std::string_view line = trimmed(std::string_view(text_).substr(position_, end - position_));
    position_ = end + 1;
    ++line_;
    if (!line.empty()) return line;
  }
  return std::nullopt;
}

void TextFile::fail(const std::string& message) const {
  throw ddpkit::InvalidArgument(fmt::format("{}:{}: {}", path_.string(), line_, message));
}

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

std::string_view next_word(std::string_view& rest) {
  rest = trimmed(rest);
  const std::string_view word = rest.substr(0, rest.find_first_of(kBlanks));
  rest.remove_prefix(word.size());
  return word;
}

std::optional<float> parse_float(std::string_view text) {
  // Parses as double: values too small for float become zero, not an error.
  const std::optional<double> value = parse<double>(text);
  if (!value || !std::isfinite(static_cast<float>(*value))) return std::nullopt;
  return static_cast<float>(*value);
}

std::optional<int> parse_int(std::string_view text) { return parse<int>(text); }

}  // namespace har
