#include "har/ts_format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>
#include <ddpkit/train/text.h>

#include "data_files.h"
#include "har/text_file.h"

namespace har {
namespace {

using data_files::lower;
using ddpkit::train::in_quotes;

namespace fs = std::filesystem;

constexpr std::string_view kTrainSuffix = "_train.ts";

struct Header {
  bool missing = true;  // '?' may occur; also the default if the header does not specify it.
  bool equal_length = true;
  bool univariate = false;
  std::optional<int> dimensions;
  std::optional<int> series_length;
  std::vector<std::string> class_names;  // [class]
};

// One file, with channels of any length.
struct TsFile {
  Header header;
  std::vector<std::vector<float>> series;  // [case * channels + channel][step]
  std::vector<std::int64_t> labels;        // [case]
  std::size_t channels = 0;
  std::size_t longest = 0;
};

bool read_bool(const TextFile& file, std::string_view tag, std::string_view value) {
  const std::string word = lower(value);
  if (word != "true" && word != "false")
    file.fail(fmt::format("{} must be true or false, not {}", tag, in_quotes(value)));
  return word == "true";
}

int read_count(const TextFile& file, std::string_view tag, std::string_view value) {
  const auto count = parse_int(value);
  if (!count || *count < 1) file.fail(fmt::format("{} must be a whole number from 1, not {}", tag, in_quotes(value)));
  return *count;
}

// In lower case.
constexpr std::array kTags = {"@problemname", "@timestamps",  "@missing",     "@univariate",
                              "@dimension",   "@dimensions",  "@equallength", "@serieslength",
                              "@classlabel",  "@targetlabel", "@data"};

// Reads up to and including @data.
Header read_header(TextFile& file) {
  Header header;
  std::set<std::string> seen;
  while (const auto line = file.next_line()) {
    if (line->front() == '#' || line->front() == '%') continue;
    if (line->front() != '@') file.fail("a line of data before @data");
    std::string_view rest = *line;
    const std::string_view written = next_word(rest);
    const std::string tag = lower(written);
    if (std::find(kTags.begin(), kTags.end(), tag) == kTags.end())
      file.fail(fmt::format("unknown tag {}: known are {}", in_quotes(written), fmt::join(kTags, ", ")));
    if (!seen.insert(tag).second) file.fail(fmt::format("{} occurs twice", written));
    if (tag == "@problemname") continue;
    const std::string_view value = next_word(rest);
    if (const std::string_view more = trimmed(rest); !more.empty() && tag != "@classlabel")
      file.fail(fmt::format("{} behind the value of {}", in_quotes(more), written));
    if (tag == "@data") {
      if (header.class_names.empty()) file.fail("no @classLabel before @data");
      if (header.univariate && header.dimensions.value_or(1) != 1)
        file.fail(fmt::format("@univariate is true, but @dimensions is {}", *header.dimensions));
      return header;
    }
    if (tag == "@timestamps" && read_bool(file, written, value)) file.fail("series with timestamps are not supported");
    if (tag == "@targetlabel" && read_bool(file, written, value)) {
      file.fail("a regression problem: its targets are no classes");
    }
    if (tag == "@missing") header.missing = read_bool(file, written, value);
    if (tag == "@equallength") header.equal_length = read_bool(file, written, value);
    if (tag == "@univariate") header.univariate = read_bool(file, written, value);
    if (tag == "@dimensions" || tag == "@dimension") header.dimensions = read_count(file, written, value);
    if (tag == "@serieslength") header.series_length = read_count(file, written, value);
    if (tag == "@classlabel") {
      if (!read_bool(file, written, value)) file.fail("no class labels: nothing to learn");
      for (auto name = next_word(rest); !name.empty(); name = next_word(rest)) {
        if (std::find(header.class_names.begin(), header.class_names.end(), name) != header.class_names.end()) {
          file.fail(fmt::format("class {} is listed twice", in_quotes(name)));
        }
        header.class_names.emplace_back(name);
      }
      if (header.class_names.empty()) file.fail(fmt::format("{} lists no classes", written));
    }
  }
  throw ddpkit::InvalidArgument(fmt::format("{} has no @data line", file.path().string()));
}

std::vector<float> read_series(const TextFile& file, const Header& header, std::string_view text) {
  std::vector<float> values;
  while (true) {
    const std::size_t comma = text.find(',');
    const std::string_view word = trimmed(text.substr(0, comma));
    if (word == "?" || lower(word) == "nan") {
      if (!header.missing) file.fail("a missing value, which @missing false rules out");
      values.push_back(std::numeric_limits<float>::quiet_NaN());
    } else if (const auto value = parse_float(word)) {
      values.push_back(*value);
    } else {
      file.fail(fmt::format("{} is no number", in_quotes(word)));
    }
    if (comma == std::string_view::npos) return values;
    text.remove_prefix(comma + 1);
  }
}

void check_length(const TextFile& file, const Header& header, const TsFile& ts, std::size_t channel,
                  std::size_t length) {
  if (!header.equal_length) return;
  const bool declared = header.series_length.has_value();
  const std::size_t expected = declared ? static_cast<std::size_t>(*header.series_length) : ts.longest;
  if (expected == 0 || length == expected) return;
  file.fail(fmt::format("channel {} has {} values, where {} {}", channel + 1, length,
                        declared ? "@seriesLength is" : "the series before have", expected));
}

TsFile read_file(const fs::path& path) {
  TextFile file(path);
  TsFile ts{.header = read_header(file), .series = {}, .labels = {}, .channels = 0, .longest = 0};
  const Header& header = ts.header;
  if (header.univariate) ts.channels = 1;
  if (header.dimensions) ts.channels = static_cast<std::size_t>(*header.dimensions);
  while (const auto line = file.next_line()) {
    if (line->front() == '#' || line->front() == '%') continue;
    std::string_view rest = *line;
    std::size_t channel = 0;
    for (std::size_t colon = rest.find(':'); colon != std::string_view::npos; colon = rest.find(':')) {
      std::vector<float> series = read_series(file, header, rest.substr(0, colon));
      check_length(file, header, ts, channel, series.size());
      ts.longest = std::max(ts.longest, series.size());
      ts.series.push_back(std::move(series));
      rest.remove_prefix(colon + 1);
      ++channel;
    }
    if (ts.channels == 0) ts.channels = channel;
    if (channel == 0 || channel != ts.channels) {
      file.fail(fmt::format("{} channels before the class label, where {} are expected", channel, ts.channels));
    }
    const std::string_view label = trimmed(rest);
    const auto found = std::find(header.class_names.begin(), header.class_names.end(), label);
    if (found == header.class_names.end()) {
      file.fail(fmt::format("class {} is none of {}", in_quotes(label), fmt::join(header.class_names, ", ")));
    }
    ts.labels.push_back(found - header.class_names.begin());
  }
  if (ts.labels.empty()) throw ddpkit::InvalidArgument(fmt::format("{} is empty: no cases", path.string()));
  return ts;
}

Recordings to_recordings(const TsFile& ts, std::size_t steps) {
  Recordings split{.channels = ts.channels, .steps = steps, .values = {}, .labels = ts.labels, .subjects = {}};
  split.values.assign(ts.series.size() * steps, std::numeric_limits<float>::quiet_NaN());
  for (std::size_t i = 0; i < ts.series.size(); ++i) {
    std::copy(ts.series[i].begin(), ts.series[i].end(), split.values.begin() + static_cast<std::ptrdiff_t>(i * steps));
  }
  return split;
}

}  // namespace

std::optional<std::string> find_ts_problem(const fs::path& folder) {
  std::vector<std::string> names;
  for (const fs::path& path : data_files::entries(folder)) {
    const std::string name = data_files::without_ending(path.filename().string(), kTrainSuffix);
    if (!name.empty()) names.push_back(name);
  }
  if (names.empty()) return std::nullopt;
  if (names.size() == 1) return names.front();
  std::sort(names.begin(), names.end());
  const std::string own_name = fs::weakly_canonical(folder).filename().string();
  if (std::find(names.begin(), names.end(), own_name) != names.end()) return own_name;
  throw ddpkit::InvalidArgument(
      fmt::format("{} holds several problems ({}): give each its own folder", folder.string(), fmt::join(names, ", ")));
}

RecordingSet read_ts(const fs::path& folder, const std::string& name) {
  const fs::path train_path = folder / (name + "_TRAIN.ts"), test_path = folder / (name + "_TEST.ts");
  const TsFile train = read_file(train_path);
  TsFile test = read_file(test_path);
  const auto disagree = [&](const std::string& what) {
    throw ddpkit::InvalidArgument(fmt::format("{} and {} disagree: {}", train_path.string(), test_path.string(), what));
  };
  if (train.channels != test.channels) {
    disagree(fmt::format("{} channels and {}", train.channels, test.channels));
  }
  if (train.longest != test.longest && train.header.equal_length && test.header.equal_length) {
    disagree(fmt::format("{} steps and {}", train.longest, test.longest));
  }
  // The same classes may be listed in another order.
  const std::vector<std::string>& names = train.header.class_names;
  std::vector<std::int64_t> class_in_train;  // [class of test]
  for (const std::string& class_name : test.header.class_names) {
    const auto found = std::find(names.begin(), names.end(), class_name);
    if (found == names.end()) disagree(fmt::format("only the second has the class {}", in_quotes(class_name)));
    class_in_train.push_back(found - names.begin());
  }
  for (std::int64_t& label : test.labels) label = class_in_train[static_cast<std::size_t>(label)];
  const std::size_t steps = std::max(train.longest, test.longest);
  return {.name = name, .class_names = names, .train = to_recordings(train, steps), .test = to_recordings(test, steps)};
}

}  // namespace har
