#include "har/ucihar.h"

#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/train/text.h>

#include "data_files.h"
#include "har/text_file.h"

namespace har {
namespace {

using ddpkit::train::in_quotes;

namespace fs = std::filesystem;

constexpr int kMostClasses = 1000;

// Reads one integer per line, each in `least` .. `most`.
std::vector<int> read_numbers(const fs::path& path, const char* what, int least, int most) {
  TextFile file(path);
  std::vector<int> numbers;
  while (const auto line = file.next_line()) {
    const auto number = parse_int(*line);
    if (!number) file.fail(fmt::format("{} is no {}", in_quotes(*line), what));
    if (*number < least || *number > most) {
      file.fail(fmt::format("{} {} is out of range: {} to {}", what, *number, least, most));
    }
    numbers.push_back(*number);
  }
  return numbers;
}

// Reads lines like "1 WALKING", numbered from 1.
std::vector<std::string> read_class_names(const fs::path& path) {
  TextFile file(path);
  std::vector<std::string> names;
  while (const auto line = file.next_line()) {
    std::string_view rest = *line;
    const std::string_view word = next_word(rest);
    const std::string_view name = trimmed(rest);
    if (parse_int(word) != static_cast<int>(names.size()) + 1 || name.empty()) {
      file.fail(fmt::format("expected '{} NAME', found {}", names.size() + 1, in_quotes(*line)));
    }
    names.emplace_back(name);
  }
  if (names.empty()) throw ddpkit::InvalidArgument(fmt::format("{} names no class", path.string()));
  return names;
}

// Reads one signal as channel `channel` of `split`: `windows` lines of `steps` values (0: as in the first line).
void read_signal(const fs::path& path, std::size_t windows, std::size_t channel, Recordings& split) {
  TextFile file(path);
  std::vector<float> values;
  std::size_t window = 0;
  while (const auto line = file.next_line()) {
    if (window == windows) file.fail(fmt::format("more windows than the {} labels of the split", windows));
    values.clear();
    std::string_view rest = *line;
    for (std::string_view word = next_word(rest); !word.empty(); word = next_word(rest)) {
      const auto value = parse_float(word);
      if (!value) file.fail(fmt::format("{} is no number", in_quotes(word)));
      values.push_back(*value);
    }
    if (split.steps == 0) {
      split.steps = values.size();
      split.values.resize(windows * split.channels * split.steps);
    }
    if (values.size() != split.steps) {
      file.fail(fmt::format("{} values, where the windows before have {}", values.size(), split.steps));
    }
    std::copy(values.begin(), values.end(),
              split.values.begin() + static_cast<std::ptrdiff_t>((window * split.channels + channel) * split.steps));
    ++window;
  }
  if (window != windows) {
    throw ddpkit::InvalidArgument(
        fmt::format("{} has {} windows, but its split has {} labels", path.string(), window, windows));
  }
}

Recordings read_split(const fs::path& folder, const std::string& name, int classes) {
  const fs::path root = folder / name;
  const fs::path labels_path = root / fmt::format("y_{}.txt", name);
  const std::vector<int> labels = read_numbers(labels_path, "class", 1, classes);
  if (labels.empty())
    throw ddpkit::InvalidArgument(fmt::format("{} is empty: no {} windows", labels_path.string(), name));

  Recordings split{.channels = kUciSignals.size(), .steps = 0, .values = {}, .labels = {}, .subjects = {}};
  for (const int label : labels) split.labels.push_back(label - 1);
  const fs::path subjects_path = data_files::in_any_case(root / fmt::format("subject_{}.txt", name));
  if (fs::exists(subjects_path)) {
    split.subjects = read_numbers(subjects_path, "subject", 0, 1'000'000);
    if (split.subjects.size() != labels.size()) {
      throw ddpkit::InvalidArgument(fmt::format("{} has {} subjects, but {} has {} labels", subjects_path.string(),
                                                split.subjects.size(), labels_path.string(), labels.size()));
    }
  }
  for (std::size_t channel = 0; channel < kUciSignals.size(); ++channel) {
    const std::string file = fmt::format("{}_{}.txt", kUciSignals[channel], name);
    read_signal(root / "Inertial Signals" / file, labels.size(), channel, split);
  }
  return split;
}

}  // namespace

bool is_ucihar(const fs::path& folder) {
  return fs::is_directory(folder / "train" / "Inertial Signals") ||
         fs::exists(data_files::in_any_case(folder / "train" / "y_train.txt"));
}

RecordingSet read_ucihar(const fs::path& folder) {
  RecordingSet set;
  set.name = fs::weakly_canonical(folder).filename().string();
  const fs::path names_path = data_files::in_any_case(folder / "activity_labels.txt");
  if (fs::exists(names_path)) set.class_names = read_class_names(names_path);
  const bool named = !set.class_names.empty();
  set.train = read_split(folder, "train", named ? static_cast<int>(set.class_names.size()) : kMostClasses);
  if (!named) {
    const auto classes = *std::max_element(set.train.labels.begin(), set.train.labels.end()) + 1;
    for (std::int64_t label = 1; label <= classes; ++label) set.class_names.push_back(std::to_string(label));
  }
  set.test = read_split(folder, "test", static_cast<int>(set.class_names.size()));
  if (set.test.steps != set.train.steps) {
    throw ddpkit::InvalidArgument(fmt::format("{}: windows of {} steps in train, but of {} in test", folder.string(),
                                              set.train.steps, set.test.steps));
  }
  return set;
}

}  // namespace har
