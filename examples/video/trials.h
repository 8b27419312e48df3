// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace video {

/// The handling of invalid data.
enum class OnBadData {
  kStop,  ///< The first fault ends the program.
  kSkip,  ///< The trial is skipped; summary() reports it.
};

/// A part of a video that shows one behaviour.
struct Trial {
  std::size_t line = 0;    ///< In the CSV file, from 1.
  std::string video;       ///< As named in the file, relative to the data folder.
  std::int64_t first = 0;  ///< Frames, from 0.
  std::int64_t last = 0;
  std::int64_t label = 0;  ///< Index into class_names.

  std::int64_t frames() const noexcept { return last - first + 1; }
};

/// Collects the faults of a data set, each with its file and line.
class DataFaults {
 public:
  DataFaults(std::filesystem::path csv, OnBadData policy) : csv_(std::move(csv)), policy_(policy) {}

  /// With kStop, throws ddpkit::InvalidArgument "FILE:LINE: message".
  void add(std::size_t line, const std::string& message);
  /// Reports a problem that does not exclude a trial.
  void note(std::size_t line, const std::string& message) { notes_.push_back(at(line, message)); }

  std::size_t count() const noexcept { return faults_.size(); }
  /// Returns the number of skipped trials and the first `most` reasons, one per line (0: none of them). Empty without
  /// faults and notes.
  std::string summary(std::size_t most = 20) const;
  std::string at(std::size_t line, const std::string& message) const;

 private:
  std::filesystem::path csv_;
  OnBadData policy_;
  std::vector<std::string> faults_;
  std::vector<std::string> notes_;
};

struct TrialSet {
  std::filesystem::path folder;
  std::vector<std::string> class_names;  ///< [class]
  std::vector<Trial> trials;             ///< In the order of the file.
};

/// The path that read_trials() reads: FOLDER/trials.csv.
std::filesystem::path trials_file(const std::filesystem::path& folder);

/// Reads FOLDER/trials.csv: columns video, start_frame, end_frame (the last frame, included) and label, in any order,
/// possibly with others. The classes are `classes`, else the lines of FOLDER/classes.txt, else all labels, sorted.
/// Reports to `faults`: an unknown label, frames that are not numbers or too few for a clip of `clip_frames`, a line
/// with too few or too many fields. Always throws ddpkit::InvalidArgument for a file that is missing or has no such
/// header, and if no trial remains.
TrialSet read_trials(const std::filesystem::path& folder, std::vector<std::string> classes, std::int64_t clip_frames,
                     DataFaults& faults);

/// Indices of trials. [trial]
struct TrialSplit {
  std::vector<std::size_t> train;
  std::vector<std::size_t> validation;
};

/// Puts about `validation_share` of the videos into the validation set, with all their trials: no video is in both
/// sets. Selects the best of many shuffles by `seed`: each class is near its share, and a class is missing from a set
/// only if unavoidable. Throws ddpkit::InvalidArgument for fewer than two videos.
TrialSplit split_by_video(const TrialSet& set, double validation_share, std::uint64_t seed);

}  // namespace video
