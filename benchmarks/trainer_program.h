// Runs of a trainer, ours or Python's, for the benchmarks that set them side by side.
#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ddpkit::bench {

/// Puts `command` on the core of its LOCAL_RANK, where there is a core for each of `ranks`: else the scheduler deals
/// them out.
std::vector<std::string> on_own_core(std::vector<std::string> command, int ranks);

/// Starts `command` on `ranks` ranks of one thread each and returns the JSON objects that rank 0 printed, one a line.
/// Throws Error, which says what the program printed, when it fails, prints none or runs for more than ten minutes.
std::vector<nlohmann::json> run_trainer(const std::vector<std::string>& command, int ranks);

/// A folder for generated data, gone with it.
class TemporaryData {
 public:
  explicit TemporaryData(const std::string& name);
  TemporaryData(const TemporaryData&) = delete;
  TemporaryData& operator=(const TemporaryData&) = delete;
  ~TemporaryData();

  std::filesystem::path path() const { return folder_ / "set"; }

 private:
  std::filesystem::path folder_;
};

}  // namespace ddpkit::bench
