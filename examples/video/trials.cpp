#include "video/trials.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>
#include <ddpkit/train/csv.h>
#include <ddpkit/train/random.h>
#include <ddpkit/train/text.h>

#include "data_files.h"

namespace video {
namespace {

using ddpkit::train::CsvRecord;
using ddpkit::train::in_quotes;
using ddpkit::train::parse_whole_number;

constexpr std::array<const char*, 4> kColumns = {"video", "start_frame", "end_frame", "label"};

std::string trimmed(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(" \t\r");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

// Returns the position of each of kColumns. [column]
std::array<std::size_t, kColumns.size()> find_columns(const std::filesystem::path& csv, const CsvRecord& header) {
  std::array<std::size_t, kColumns.size()> places{};
  for (std::size_t column = 0; column < kColumns.size(); ++column) {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < header.fields.size(); ++i) {
      if (trimmed(header.fields[i]) == kColumns[column]) found.push_back(i);
    }
    if (found.size() != 1)
      throw ddpkit::InvalidArgument(
          fmt::format("{}:{}: the first line must name the columns {}, in any order; it has {} {}: {}", csv.string(),
                      header.line, fmt::join(kColumns, ","), found.empty() ? "no" : "more than one", kColumns[column],
                      in_quotes(fmt::format("{}", fmt::join(header.fields, ",")))));
    places[column] = found.front();
  }
  return places;
}

std::vector<std::string> read_classes(const std::filesystem::path& path) {
  std::vector<std::string> names;
  std::istringstream file(data_files::read_text(path));
  std::size_t number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    const std::string name = trimmed(line);
    if (name.empty()) continue;
    if (std::find(names.begin(), names.end(), name) != names.end())
      throw ddpkit::InvalidArgument(
          fmt::format("{}:{}: the class {} occurs twice", path.string(), number, in_quotes(name)));
    names.push_back(name);
  }
  if (names.empty()) throw ddpkit::InvalidArgument(fmt::format("{} names no class", path.string()));
  return names;
}

std::optional<std::string> read_trial(const CsvRecord& record, const std::array<std::size_t, 4>& places,
                                      std::size_t columns, std::int64_t clip_frames, Trial& trial, std::string& label) {
  if (!record.fault.empty()) return record.fault;
  if (record.fields.size() != columns)
    return fmt::format("has {} fields, and the header {}", record.fields.size(), columns);
  trial.line = record.line;
  trial.video = trimmed(record.fields[places[0]]);
  if (trial.video.empty()) return "names no video";
  const auto first = parse_whole_number(record.fields[places[1]]), last = parse_whole_number(record.fields[places[2]]);
  if (!first) return fmt::format("start_frame {} is no whole number", in_quotes(record.fields[places[1]]));
  if (!last) return fmt::format("end_frame {} is no whole number", in_quotes(record.fields[places[2]]));
  trial.first = *first;
  trial.last = *last;
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  if (*first < 0 || *last < *first || *last > kMost)
    return fmt::format("there are no frames {} to {}: they count from 0", *first, *last);
  if (trial.frames() < clip_frames)
    return fmt::format("frames {} to {} are {}, fewer than a clip's {}", *first, *last, trial.frames(), clip_frames);
  label = trimmed(record.fields[places[3]]);
  if (label.empty()) return "has no label";
  return std::nullopt;
}

// Trials of each class in each video. [video][class]
using Counts = std::vector<std::vector<double>>;

}  // namespace

void DataFaults::add(std::size_t line, const std::string& message) {
  if (policy_ == OnBadData::kStop) throw ddpkit::InvalidArgument(at(line, message));
  faults_.push_back(at(line, message));
}

std::string DataFaults::at(std::size_t line, const std::string& message) const {
  return fmt::format("{}:{}: {}", csv_.string(), line, message);
}

std::string DataFaults::summary(std::size_t most) const {
  std::string text;
  const auto list = [&](const std::vector<std::string>& lines) {
    if (most == 0) return;
    text += ":";
    for (std::size_t i = 0; i < std::min(most, lines.size()); ++i) text += "\n  " + lines[i];
    if (lines.size() > most) text += fmt::format("\n  and {} more", lines.size() - most);
  };
  if (!faults_.empty()) {
    text += fmt::format("{} bad trial{} skipped", faults_.size(), faults_.size() == 1 ? "" : "s");
    list(faults_);
  }
  if (!notes_.empty()) {
    text += fmt::format("{}{} note{}", text.empty() ? "" : "\n", notes_.size(), notes_.size() == 1 ? "" : "s");
    list(notes_);
  }
  return text;
}

std::filesystem::path trials_file(const std::filesystem::path& folder) {
  return data_files::in_any_case(folder / "trials.csv");
}

TrialSet read_trials(const std::filesystem::path& folder, std::vector<std::string> classes, std::int64_t clip_frames,
                     DataFaults& faults) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error))
    throw ddpkit::InvalidArgument(std::filesystem::exists(folder, error)
                                      ? fmt::format("{} is not a folder", folder.string())
                                      : fmt::format("there is no data folder {}", folder.string()));
  const std::filesystem::path csv = trials_file(folder);
  const std::vector<CsvRecord> records = ddpkit::train::read_csv(csv);
  if (records.empty()) throw ddpkit::InvalidArgument(fmt::format("{}:1: is empty", csv.string()));
  const auto places = find_columns(csv, records.front());
  const std::filesystem::path names = data_files::in_any_case(folder / "classes.txt");
  if (classes.empty() && std::filesystem::exists(names, error)) classes = read_classes(names);
  const bool known = !classes.empty();

  TrialSet set{.folder = folder, .class_names = std::move(classes), .trials = {}};
  std::vector<std::string> labels;  // [trial]
  for (std::size_t i = 1; i < records.size(); ++i) {
    Trial trial;
    std::string label;
    auto fault = read_trial(records[i], places, records.front().fields.size(), clip_frames, trial, label);
    if (!fault && known && std::find(set.class_names.begin(), set.class_names.end(), label) == set.class_names.end())
      fault = fmt::format("unknown label {}: the classes are {}", in_quotes(label), fmt::join(set.class_names, ", "));
    if (fault) {
      faults.add(records[i].line, *fault);
      continue;
    }
    set.trials.push_back(std::move(trial));
    labels.push_back(std::move(label));
  }
  if (set.trials.empty()) throw ddpkit::InvalidArgument(fmt::format("{} holds no trial to use", csv.string()));
  if (!known) {
    const std::set<std::string> sorted(labels.begin(), labels.end());
    set.class_names.assign(sorted.begin(), sorted.end());
  }
  for (std::size_t i = 0; i < labels.size(); ++i)
    set.trials[i].label =
        std::find(set.class_names.begin(), set.class_names.end(), labels[i]) - set.class_names.begin();
  return set;
}

TrialSplit split_by_video(const TrialSet& set, double validation_share, std::uint64_t seed) {
  std::map<std::string, std::vector<std::size_t>> of_video;
  for (std::size_t i = 0; i < set.trials.size(); ++i) of_video[set.trials[i].video].push_back(i);
  if (of_video.size() < 2)
    throw ddpkit::InvalidArgument(
        fmt::format("the trials are of {} video: training and validation need one each", of_video.size()));
  std::vector<std::vector<std::size_t>> videos;  // Trials. [video]
  Counts counts;
  std::vector<double> all(set.class_names.size());
  for (const auto& [name, trials] : of_video) {
    std::vector<double> classes(set.class_names.size());
    for (const std::size_t trial : trials) {
      ++classes[static_cast<std::size_t>(set.trials[trial].label)];
      ++all[static_cast<std::size_t>(set.trials[trial].label)];
    }
    videos.push_back(trials);
    counts.push_back(std::move(classes));
  }
  const auto held_out = std::clamp<std::size_t>(
      static_cast<std::size_t>(std::llround(validation_share * static_cast<double>(videos.size()))), 1,
      videos.size() - 1);

  ddpkit::train::Random random(seed);
  std::vector<std::size_t> order(videos.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::vector<std::size_t> best;
  double best_cost = INFINITY;
  constexpr int kShuffles = 1000;
  for (int shuffle = 0; shuffle < kShuffles; ++shuffle) {
    random.shuffle(order);
    double cost = 0;
    for (std::size_t k = 0; k < all.size(); ++k) {
      double inside = 0;
      for (std::size_t i = 0; i < held_out; ++i) inside += counts[order[i]][k];
      if (all[k] > 0) cost += std::abs(inside / all[k] - validation_share);
      if (all[k] > 1 && (inside == 0 || inside == all[k])) cost += 10;  // A cost above any distance.
    }
    if (cost >= best_cost) continue;
    best_cost = cost;
    best.assign(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(held_out));
  }
  const std::set<std::size_t> validation(best.begin(), best.end());
  TrialSplit split;
  for (std::size_t video = 0; video < videos.size(); ++video) {
    auto& side = validation.contains(video) ? split.validation : split.train;
    side.insert(side.end(), videos[video].begin(), videos[video].end());
  }
  std::sort(split.train.begin(), split.train.end());
  std::sort(split.validation.begin(), split.validation.end());
  return split;
}

}  // namespace video
