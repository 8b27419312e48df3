#include <torch/torch.h>

#include <ddpkit/error.h>

#include "har/dataset.h"
#include "har/generate.h"
#include "har/ts_format.h"
#include "har/ucihar.h"
#include "support/catch.h"
#include "support/folder.h"

using namespace har;
using ddpkit::testing::Folder;
using ddpkit::testing::names_in;
using ddpkit::testing::read_file;
using ddpkit::testing::write_file;

namespace {

// Writes three training and two test windows of two steps. A value encodes signal, window and step: 100 s + 10 w + t.
void write_ucihar(const std::filesystem::path& root) {
  for (const auto& [split, windows] : {std::pair{"train", 3}, std::pair{"test", 2}}) {
    const std::string name = split;
    std::string labels;
    for (int window = 0; window < windows; ++window) labels += std::to_string(window + 1) + "\n";
    write_file(root / name / ("y_" + name + ".txt"), labels);
    for (std::size_t signal = 0; signal < kUciSignals.size(); ++signal) {
      std::string text;
      for (int window = 0; window < windows; ++window) {
        const int value = static_cast<int>(signal) * 100 + window * 10;
        text += "  " + std::to_string(value) + ".0e+000  " + std::to_string(value + 1) + "\r\n";
      }
      write_file(root / name / "Inertial Signals" / (std::string(kUciSignals[signal]) + "_" + name + ".txt"), text);
    }
  }
}

const char* const kTs =
    "# A comment\n"
    "@problemName Toy\n"
    "@timeStamps false\n"
    "@missing false\n"
    "@univariate false\n"
    "@dimensions 2\n"
    "@equalLength true\n"
    "@seriesLength 3\n"
    "@classLabel true up down\n"
    "@data\n"
    "1,2,3:4,5,6:up\n"
    "-1,-2,-3e0:0.5,0.25,0:down\n";

struct TsFolder {
  TsFolder(const std::string& train, const std::string& test) {
    write_file(folder / "Toy_TRAIN.ts", train);
    write_file(folder / "Toy_TEST.ts", test);
  }
  RecordingSet read() const { return read_recordings(folder.path()); }
  Folder folder;
};

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

// Checks the error for a training file that differs from kTs.
void check_ts_error(const std::string& from, const std::string& to, const std::string& message) {
  CAPTURE(from, to);
  CHECK_THROWS_WITH(TsFolder(replaced(kTs, from, to), kTs).read(), ContainsSubstring(message));
}

}  // namespace

TEST_CASE("the UCI-HAR layout gives windows by channel, and classes from 0", "[har]") {
  const Folder folder;
  write_ucihar(folder.path());
  const RecordingSet set = read_recordings(folder.path());
  CHECK(set.train.windows() == 3);
  CHECK(set.test.windows() == 2);
  CHECK(set.train.channels == 9);
  CHECK(set.train.steps == 2);
  CHECK(set.train.labels == std::vector<std::int64_t>{0, 1, 2});
  CHECK(set.class_names == std::vector<std::string>{"1", "2", "3"});
  CHECK(set.train.subjects.empty());
  for (std::size_t window = 0; window < 3; ++window) {
    for (std::size_t signal = 0; signal < 9; ++signal) {
      for (std::size_t step = 0; step < 2; ++step) {
        CHECK(set.train.values[(window * 9 + signal) * 2 + step] ==
              static_cast<float>(signal * 100 + window * 10 + step));
      }
    }
  }
  write_file(folder / "activity_labels.txt", "1 WALKING\n2 SITTING\n3 LAYING\n4 FLYING\n");
  write_file(folder / "train/subject_train.txt", "1\n1\n7\n");
  const RecordingSet named = read_recordings(folder.path());
  CHECK(named.class_names == std::vector<std::string>{"WALKING", "SITTING", "LAYING", "FLYING"});
  CHECK(named.train.subjects == std::vector<int>{1, 1, 7});
}

TEST_CASE("a wrong UCI-HAR folder is one sentence with file and line", "[har]") {
  const Folder folder;
  const std::string signal = "train/Inertial Signals/body_gyro_y_train.txt";
  const auto refuse = [&](const std::string& file, const std::string& text, const std::string& message) {
    CAPTURE(file, text);
    write_ucihar(folder.path());
    write_file(folder / file, text);
    CHECK_THROWS_WITH(read_recordings(folder.path()), ContainsSubstring(message));
    std::filesystem::remove(folder / file);
  };
  refuse(signal, "1 2\n1 x2\n3 4\n", "body_gyro_y_train.txt:2: 'x2' is no number");
  refuse(signal, "1 2\n1 2e\n3 4\n", "body_gyro_y_train.txt:2: '2e' is no number");
  refuse(signal, "1 2\n1 nan\n3 4\n", "body_gyro_y_train.txt:2: 'nan' is no number");
  refuse(signal, "1 2\n1 1e99\n3 4\n", "body_gyro_y_train.txt:2: '1e99' is no number");
  refuse(signal, "1 2\n1 2\n3 4 5\n", "body_gyro_y_train.txt:3: 3 values, where the windows before have 2");
  refuse(signal, "1 2\n1 2\n", "body_gyro_y_train.txt has 2 windows, but its split has 3 labels");
  refuse(signal, "1 2\n1 2\n1 2\n\n1 2\n", "body_gyro_y_train.txt:5: more windows than the 3 labels");
  refuse(signal, std::string("1 2\n1 \0\n", 8), "body_gyro_y_train.txt:2: '?' is no number");
  refuse("train/y_train.txt", "1\ntwo\n3\n", "y_train.txt:2: 'two' is no class");
  refuse("train/y_train.txt", "1\n0\n3\n", "y_train.txt:2: class 0 is out of range: 1 to");
  refuse("train/y_train.txt", "\n", "y_train.txt is empty");
  refuse("train/y_train.txt", "1\n99999999999999999999\n3\n", "y_train.txt:2:");
  refuse("test/y_test.txt", "1\n4\n", "y_test.txt:2: class 4 is out of range: 1 to 3");
  refuse("train/subject_train.txt", "1\n2\n", "subject_train.txt has 2 subjects, but");
  refuse("activity_labels.txt", "1 A\n3 B\n", "activity_labels.txt:2: expected '2 NAME', found '3 B'");
  refuse("activity_labels.txt", "1 A\n2 B\n", "y_train.txt:3: class 3 is out of range: 1 to 2");

  write_ucihar(folder.path());
  std::filesystem::remove(folder / signal);
  CHECK_THROWS_WITH(read_recordings(folder.path()), ContainsSubstring("there is no file") && ContainsSubstring(signal));
  write_ucihar(folder.path());
  for (const char* name : kUciSignals) {
    write_file(folder / "test/Inertial Signals" / (std::string(name) + "_test.txt"), "1 2 3\n1 2 3\n");
  }
  CHECK_THROWS_WITH(read_recordings(folder.path()), ContainsSubstring("windows of 2 steps in train, but of 3 in test"));
}

TEST_CASE("a .ts problem gives channels by case, whatever the order of classes in the test file", "[har]") {
  const TsFolder ts(kTs, replaced(kTs, "up down", "down up"));
  const RecordingSet set = ts.read();
  CHECK(set.name == "Toy");
  CHECK(set.class_names == std::vector<std::string>{"up", "down"});
  CHECK(set.train.channels == 2);
  CHECK(set.train.steps == 3);
  CHECK(set.train.values == std::vector<float>{1, 2, 3, 4, 5, 6, -1, -2, -3, 0.5, 0.25, 0});
  CHECK(set.train.labels == std::vector<std::int64_t>{0, 1});
  CHECK(set.test.labels == std::vector<std::int64_t>{0, 1});
}

TEST_CASE("a .ts header may be short, its series of unequal length or with gaps", "[har]") {
  const std::string text = "@missing true\n@equalLength false\n@classLabel true a b\n@data\n1,?,3:a\n4:b\n";
  const RecordingSet set = TsFolder(text, "@equallength false\n@CLASSLABEL true b\n@DATA\n1,2,3,4,NaN:b\n").read();
  CHECK(set.train.channels == 1);
  CHECK(set.train.steps == 5);
  CHECK(std::isnan(set.train.values[1]));
  CHECK(set.train.values[2] == 3);
  CHECK(std::isnan(set.train.values[3]));
  CHECK(set.train.values[5] == 4);
  CHECK(std::isnan(set.train.values[6]));
  CHECK(set.test.labels == std::vector<std::int64_t>{1});
}

TEST_CASE("a wrong .ts file is one sentence with file and line", "[har]") {
  check_ts_error("4,5,6", "4,five,6", "Toy_TRAIN.ts:11: 'five' is no number");
  check_ts_error("4,5,6", "4,,6", "Toy_TRAIN.ts:11: '' is no number");
  check_ts_error("4,5,6", "4,?,6", "Toy_TRAIN.ts:11: a missing value, which @missing false rules out");
  check_ts_error("4,5,6", "4,5", "Toy_TRAIN.ts:11: channel 2 has 2 values, where @seriesLength is 3");
  check_ts_error("4,5,6:", "", "Toy_TRAIN.ts:11: 1 channels before the class label, where 2 are expected");
  check_ts_error(":down", ":sideways", "Toy_TRAIN.ts:12: class 'sideways' is none of up, down");
  check_ts_error("1,2,3:4,5,6:up", "up", "Toy_TRAIN.ts:11: 0 channels");
  check_ts_error("@dimensions 2", "@dimensions two",
                 "Toy_TRAIN.ts:6: @dimensions must be a whole number from 1, not 'two'");
  check_ts_error("@seriesLength 3", "@seriesLength 4", "where @seriesLength is 4");
  check_ts_error("@missing false", "@missing maybe", "Toy_TRAIN.ts:4: @missing must be true or false, not 'maybe'");
  check_ts_error("@timeStamps false", "@timeStamps true", "Toy_TRAIN.ts:3: series with timestamps are not supported");
  check_ts_error("@classLabel true up down", "@classLabel false", "no class labels");
  check_ts_error("@classLabel true up down", "@classLabel true", "lists no classes");
  check_ts_error("@classLabel true up down", "@classLabel true up up", "class 'up' is listed twice");
  check_ts_error("@classLabel true up down\n", "", "no @classLabel before @data");
  check_ts_error("@data\n", "", "a line of data before @data");
  check_ts_error("@univariate false", "@univariate true", "@univariate is true, but @dimensions is 2");
  check_ts_error("@dimensions 2", "@dimensions 2\n@Dimensions 3", "Toy_TRAIN.ts:7: @Dimensions occurs twice");
  check_ts_error("@dimensions 2", "@dimensions 2 3", "Toy_TRAIN.ts:6: '3' behind the value of @dimensions");
  check_ts_error("@data\n", "@seriesWidth 3\n@data\n", "Toy_TRAIN.ts:10: unknown tag '@seriesWidth'");
  CHECK_THROWS_WITH(TsFolder("@classLabel true a\n", kTs).read(), ContainsSubstring("Toy_TRAIN.ts has no @data line"));
  CHECK_THROWS_WITH(TsFolder("@classLabel true a\n@data\n", kTs).read(), ContainsSubstring("Toy_TRAIN.ts is empty"));
  // The reader trusts a length in a header only if the data has that length.
  CHECK_THROWS_WITH(TsFolder(replaced(kTs, "@seriesLength 3", "@seriesLength 2000000000"), kTs).read(),
                    ContainsSubstring("where @seriesLength is 2000000000"));
}

TEST_CASE("a train and a test file that disagree are refused", "[har]") {
  const std::string one_channel = "@equalLength true\n@classLabel true up down\n@data\n1,2,3:up\n";
  CHECK_THROWS_WITH(TsFolder(kTs, one_channel).read(), ContainsSubstring("disagree: 2 channels and 1"));
  const std::string longer = "@equalLength true\n@classLabel true up down\n@data\n1,2,3,4:1,2,3,4:up\n";
  CHECK_THROWS_WITH(TsFolder(kTs, longer).read(), ContainsSubstring("disagree: 3 steps and 4"));
  const std::string other = "@classLabel true up left\n@data\n1,2,3:1,2,3:up\n";
  CHECK_THROWS_WITH(TsFolder(kTs, other).read(), ContainsSubstring("only the second has the class 'left'"));
  const TsFolder ts(kTs, kTs);
  std::filesystem::remove(ts.folder / "Toy_TEST.ts");
  CHECK_THROWS_WITH(ts.read(), ContainsSubstring("there is no file") && ContainsSubstring("Toy_TEST.ts"));
}

TEST_CASE("a folder without a data set is an error that names the expected files", "[har]") {
  const Folder folder;
  CHECK_THROWS_WITH(read_recordings(folder / "none"), ContainsSubstring("there is no data folder"));
  CHECK_THROWS_WITH(read_recordings(folder.path()), ContainsSubstring("neither the UCI-HAR layout"));
  write_file(folder / "A_TRAIN.ts", kTs);
  write_file(folder / "B_TRAIN.ts", kTs);
  CHECK_THROWS_WITH(read_recordings(folder.path()), ContainsSubstring("several problems (A, B)"));
  CHECK_THROWS_WITH(read_recordings(folder / "A_TRAIN.ts"), ContainsSubstring("is not a folder"));
}

TEST_CASE("both splits are normalised by the training windows", "[har]") {
  const std::string test = replaced(kTs, "1,2,3:4,5,6", "101,102,103:4,5,6");
  const Dataset dataset = normalised(TsFolder(kTs, test).read());
  CHECK(dataset.train.windows.sizes() == at::IntArrayRef({2, 2, 3}));
  CHECK(dataset.train.windows.scalar_type() == at::kFloat);
  CHECK(dataset.train.labels.scalar_type() == at::kLong);
  CHECK(dataset.train.windows.mean(at::IntArrayRef({0, 2})).abs().max().item<double>() < 1e-6);
  CHECK((dataset.train.windows.std(at::IntArrayRef({0, 2}), false) - 1).abs().max().item<double>() < 1e-6);
  const double deviation = std::sqrt(28.0 / 6);  // Of 1, 2, 3, -1, -2, -3.
  CHECK(dataset.test.windows[0][0][0].item<double>() == Approx(101 / deviation));
}

TEST_CASE("missing values become the channel's mean, a dead sensor becomes zero", "[har]") {
  const std::string text = "@classLabel true a b\n@data\n1,?,3:7,7,7:?,?,?:a\n3,1,2:7,7,7:?,?,?:b\n";
  const Dataset dataset = normalised(TsFolder(text, text).read());
  CHECK(dataset.train.windows[0][0][1].item<double>() == 0);
  CHECK(dataset.train.windows[0][0].sum().item<double>() == Approx(0).margin(1e-6));
  CHECK(dataset.train.windows.slice(1, 1, 3).abs().max().item<double>() == 0);
}

TEST_CASE("a generated set is read back, the same for the same seed, and replaces nothing", "[har]") {
  const Folder folder;
  generate_ucihar(folder / "a", {.train = 13, .test = 7, .steps = 16, .seed = 3});
  generate_ucihar(folder / "b", {.train = 13, .test = 7, .steps = 16, .seed = 3});
  generate_ucihar(folder / "c", {.train = 13, .test = 7, .steps = 16, .seed = 4});
  CHECK(names_in(folder.path()) == std::vector<std::string>{"a", "b", "c"});
  const RecordingSet a = read_recordings(folder / "a");
  CHECK(a.train.windows() == 13);
  CHECK(a.test.windows() == 7);
  CHECK(a.train.channels == 9);
  CHECK(a.train.steps == 16);
  CHECK(a.class_names.size() == 6);
  CHECK(a.test.subjects.size() == 7);
  CHECK(read_recordings(folder / "b").train.values == a.train.values);
  CHECK(read_recordings(folder / "c").train.values != a.train.values);
  const std::string before = read_file(folder / "a/train/y_train.txt");
  CHECK_THROWS_WITH(generate_ucihar(folder / "a", {.train = 1, .test = 1}), ContainsSubstring("nothing was written"));
  CHECK(read_file(folder / "a/train/y_train.txt") == before);
  CHECK_THROWS_AS(generate_ucihar(folder / "d", {.train = 0}), ddpkit::InvalidArgument);
  CHECK_THROWS_AS(generate_ucihar("/proc/none/x", {.train = 1, .test = 1, .steps = 1}), ddpkit::Error);
}
