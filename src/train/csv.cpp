#include <ddpkit/train/csv.h>

#include <fstream>
#include <iterator>
#include <system_error>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>

namespace ddpkit::train {
namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {
    if (text_.starts_with(kByteOrderMark)) text_.remove_prefix(kByteOrderMark.size());
  }

  std::vector<CsvRecord> all() {
    std::vector<CsvRecord> records;
    while (position_ < text_.size()) {
      CsvRecord record = next();
      if (record.fields.size() > 1 || !record.fields.front().empty() || !record.fault.empty())
        records.push_back(std::move(record));
    }
    return records;
  }

 private:
  bool at_line_end() const {
    return position_ == text_.size() || text_[position_] == '\n' || text_.substr(position_, 2) == "\r\n";
  }

  CsvRecord next() {
    CsvRecord record{.line = line_, .fields = {}, .fault = {}};
    while (true) {
      record.fields.push_back(field(record.fault));
      if (position_ < text_.size() && text_[position_] == ',') {
        ++position_;
        continue;
      }
      break;
    }
    if (position_ < text_.size()) {
      position_ += text_[position_] == '\r' ? 2 : 1;
      ++line_;
    }
    return record;
  }

  std::string field(std::string& fault) {
    std::string value;
    if (position_ < text_.size() && text_[position_] == '"') {
      ++position_;
      while (true) {
        if (position_ == text_.size()) {
          fault = "a quote is never closed";
          return value;
        }
        const char c = text_[position_++];
        if (c == '"') {
          if (position_ == text_.size() || text_[position_] != '"') break;
          ++position_;
        }
        if (c == '\n') ++line_;
        value += c;
      }
      if (!at_line_end() && text_[position_] != ',') fault = "there is text behind a closing quote";
    }
    while (!at_line_end() && text_[position_] != ',') value += text_[position_++];
    return value;
  }

  std::string_view text_;
  std::size_t position_ = 0;
  std::size_t line_ = 1;
};

}  // namespace

std::vector<CsvRecord> parse_csv(std::string_view text) { return Parser(text).all(); }

std::vector<CsvRecord> read_csv(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) throw InvalidArgument(fmt::format("there is no file {}", path.string()));
  if (!std::filesystem::is_regular_file(path, error))
    throw InvalidArgument(fmt::format("{} is not a file", path.string()));
  std::ifstream file(path, std::ios::binary);
  std::string text;
  if (file) text.assign(std::istreambuf_iterator<char>(file), {});
  if (!file) throw InvalidArgument(fmt::format("cannot read {}", path.string()));
  return parse_csv(text);
}

std::string csv_field(std::string_view text) {
  if (text.find_first_of(",\"\r\n") == std::string_view::npos) return std::string(text);
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + '"';
}

std::optional<long long> parse_whole_number(std::string_view text) {
  constexpr std::string_view kBlanks = " \t";
  const std::size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return std::nullopt;
  text = text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
  long long value = 0;
  return parse_number(text, value) ? std::optional(value) : std::nullopt;
}

}  // namespace ddpkit::train
