// Formats with numbers in text files: UCI-HAR, .ts, CSV of prices.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "clstm_ppo/prices.h"
#include "har/dataset.h"
#include "har/ucihar.h"
#include "readers/formats.h"

namespace ddpkit::testing {
namespace {

float drawn_float(std::mt19937& random) { return std::uniform_real_distribution<float>(-9, 9)(random); }

std::string text_of(const har::RecordingSet& set) {
  std::string text = fmt::format("{}\n", fmt::join(set.class_names, " "));
  for (const har::Recordings* split : {&set.train, &set.test}) {
    const std::size_t size = split->channels * split->steps;
    text += fmt::format("{} windows of {} x {}\n", split->windows(), split->channels, split->steps);
    for (std::size_t window = 0; window < split->windows(); ++window) {
      const auto first = split->values.begin() + static_cast<std::ptrdiff_t>(window * size);
      text += fmt::format("{} {} {}\n", split->labels[window], split->subjects.empty() ? 0 : split->subjects[window],
                          fmt::join(first, first + static_cast<std::ptrdiff_t>(size), " "));
    }
  }
  return text;
}

har::RecordingSet random_set(std::size_t channels, std::mt19937& random) {
  har::RecordingSet set{.name = {}, .class_names = {"WALKING", "SITTING", "LAYING_DOWN"}, .train = {}, .test = {}};
  const auto steps = static_cast<std::size_t>(drawn(random, 2, 6));
  for (har::Recordings* split : {&set.train, &set.test}) {
    split->channels = channels;
    split->steps = steps;
    for (int windows = drawn(random, 3, 9); windows > 0; --windows) {
      split->labels.push_back(drawn(random, 0, 2));
      split->subjects.push_back(drawn(random, 1, 30));
      for (std::size_t i = 0; i < channels * steps; ++i) split->values.push_back(drawn_float(random));
    }
  }
  return set;
}

/// Formats the values of one channel of one window, separated by `parted`.
std::string series(const har::Recordings& split, std::size_t window, std::size_t channel, const char* parted) {
  const auto first =
      split.values.begin() + static_cast<std::ptrdiff_t>((window * split.channels + channel) * split.steps);
  return fmt::format("{}", fmt::join(first, first + static_cast<std::ptrdiff_t>(split.steps), parted));
}

/// Follows "UCI HAR Dataset/README.txt": one window per line of each signal, "1 NAME" per line of the activities.
std::string write_ucihar(const Path& folder, std::mt19937& random) {
  const har::RecordingSet set = random_set(har::kUciSignals.size(), random);
  std::string names;
  for (std::size_t i = 0; i < set.class_names.size(); ++i) names += fmt::format("{} {}\n", i + 1, set.class_names[i]);
  write_file(folder / "activity_labels.txt", names);
  for (const auto& [name, split] : {std::pair("train", &set.train), std::pair("test", &set.test)}) {
    std::string labels, subjects;
    for (std::size_t window = 0; window < split->windows(); ++window) {
      labels += fmt::format("{}\n", split->labels[window] + 1);
      subjects += fmt::format("{}\n", split->subjects[window]);
    }
    write_file(folder / name / fmt::format("y_{}.txt", name), labels);
    write_file(folder / name / fmt::format("subject_{}.txt", name), subjects);
    for (std::size_t channel = 0; channel < split->channels; ++channel) {
      std::string signal;
      for (std::size_t window = 0; window < split->windows(); ++window)
        signal += "  " + series(*split, window, channel, "  ") + "\n";
      write_file(folder / name / "Inertial Signals" / fmt::format("{}_{}.txt", har::kUciSignals[channel], name),
                 signal);
    }
  }
  return text_of(set);
}

/// Follows sktime's specification of the .ts format, with every tag of its header.
std::string write_ts(const Path& folder, std::mt19937& random) {
  har::RecordingSet set = random_set(2, random);
  for (const auto& [name, split] : {std::pair("TRAIN", &set.train), std::pair("TEST", &set.test)}) {
    split->subjects.clear();
    std::string text = fmt::format(
        "# A comment\n@problemName Toy\n@timeStamps false\n@missing false\n@univariate false\n@dimensions 2\n"
        "@equalLength true\n@seriesLength {}\n@classLabel true {}\n@data\n",
        split->steps, fmt::join(set.class_names, " "));
    for (std::size_t window = 0; window < split->windows(); ++window)
      text += fmt::format("{}:{}:{}\n", series(*split, window, 0, ","), series(*split, window, 1, ","),
                          set.class_names[static_cast<std::size_t>(split->labels[window])]);
    write_file(folder / fmt::format("Toy_{}.ts", name), text);
  }
  return text_of(set);
}

std::string read_set(const Path& folder) { return text_of(har::read_recordings(folder)); }

/// Writes two assets, one file each. The prices of a bar satisfy Low <= Open, Close <= High, and the first bar's Close
/// is above its Low, so that the two columns differ.
std::string write_prices(const Path& folder, std::mt19937& random) {
  std::string expected;
  for (const char* asset : {"AAA", "BBB"}) {
    std::string text = "Date,Open,High,Low,Close,Volume,Note\n";
    for (int bars = drawn(random, 3, 12), bar = 0; bar < bars; ++bar) {
      const int low = drawn(random, 10, 90), high = low + drawn(random, 2, 9);
      const std::string row = fmt::format("2024-01-{:02d},{},{},{},{},{}", bar + 1, drawn(random, low, high), high, low,
                                          drawn(random, bar == 0 ? low + 1 : low, high), drawn(random, 0, 999));
      text += row + ",\"a, b\"\n";
      expected += fmt::format("{} {}\n", asset, row);
    }
    write_file(folder / fmt::format("{}.csv", asset), text);
  }
  return expected;
}

std::string read_prices(const Path& folder) {
  std::string text;
  for (const clstm_ppo::PriceSeries& one : clstm_ppo::read_price_folder(folder, {})) {
    for (std::size_t bar = 0; bar < one.size(); ++bar)
      text += fmt::format("{} {},{},{},{},{},{}\n", one.name, one.dates[bar], one.open[bar], one.high[bar],
                          one.low[bar], one.close[bar], one.volume[bar]);
  }
  return text;
}

}  // namespace

Format ucihar_format() {
  return {.name = "UCI-HAR",
          .write = write_ucihar,
          .read = read_set,
          .text_files = {".txt"},
          .edits = {{"activity_labels", "activity_labels.txt", "WALKING", "RUNNING"},
                    {"activity_labels", "activity_labels.txt", "1 ", "7 "},
                    {"labels", "train/y_train.txt", "\n", "\n1\n"},
                    {"subject_test", "test/subject_test.txt", "\n", "0\n"},
                    {"body_gyro_z", "train/Inertial Signals/body_gyro_z_train.txt", "  ", "  1"}}};
}

Format ts_format() {
  const std::string file = "Toy_TRAIN.ts";
  return {.name = ".ts",
          .write = write_ts,
          .read = read_set,
          .text_files = {".ts"},
          .edits = {{"timestamps", file, "@timeStamps false", "@timeStamps true"},
                    {"@missing", file, "@missing false", "@missing maybe"},
                    {"@univariate", file, "@univariate false", "@univariate true"},
                    {"channels", file, "@dimensions 2", "@dimensions 3"},
                    {"@equalLength", file, "@equalLength true", "@equalLength 1"},
                    {"@seriesLength", file, "@seriesLength ", "@seriesLength 1"},
                    {"@classLabel", file, "WALKING SITTING", "SITTING WALKING"},
                    {"regression", file, "@classLabel true", "@targetLabel true\n@classLabel true"},
                    {"@data", file, "@data", "@Datum"},
                    {"@seriesWidth", file, "@data", "@seriesWidth 3\n@data"}}};
}

Format prices_format() {
  const std::string file = "AAA.csv";
  std::vector<Edit> edits;
  for (const char* column : {"Date", "Open", "High", "Low", "Close", "Volume"})
    edits.push_back({column, file, column, std::string("X") + column});
  edits.push_back({"Low", file, "Low,Close", "Close,Low"});
  edits.push_back({"Date", file, "2024-01-01", "2023-01-01"});
  edits.push_back({"Date", file, "2024-01-01", "01/01/2024"});
  edits.push_back({"ExpectedGrowth", file, "Note", "ExpectedGrowth"});
  return {.name = "prices", .write = write_prices, .read = read_prices, .text_files = {".csv"}, .edits = edits};
}

}  // namespace ddpkit::testing
