// The metrics of all epochs of a run, as a table and as curves.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace ddpkit::train {

/// The rows of metrics.csv. For rank 0 only.
class History {
 public:
  explicit History(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// Reads the epochs up to `step` from the folder. A resumed run reports later epochs again. Logs an unreadable file
  /// and then starts without rows.
  void load(std::int64_t step);

  /// Adds an epoch and rewrites metrics.csv and curves.svg atomically. `values`: tag and value. `x_name`: "Epoch".
  void add(std::int64_t epoch, std::int64_t step, const std::vector<std::pair<std::string, double>>& values,
           const std::string& x_name);

 private:
  struct Row {
    std::int64_t epoch = 0, step = 0;
    std::vector<double> values;  // NaN: none. May be shorter than tags_. [tag]
  };

  std::string table() const;
  std::string curves(const std::string& x_name) const;

  std::filesystem::path folder_;
  std::vector<std::string> tags_;
  std::vector<Row> rows_;
};

}  // namespace ddpkit::train
