// Runs a trainer of ddpkit or Python, for benchmarks that compare them.
#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ddpkit::bench {

/// Pins `command` to the core of its LOCAL_RANK if there is one core for each of `ranks`. Otherwise the scheduler
/// assigns the cores.
std::vector<std::string> on_own_core(std::vector<std::string> command, int ranks);

/// Starts `command` on `ranks` ranks with one thread each. Returns the JSON objects that rank 0 printed, one per line.
/// Throws Error with the output if the program fails, prints no object or runs for more than ten minutes.
std::vector<nlohmann::json> run_trainer(const std::vector<std::string>& command, int ranks);

/// A temporary folder for generated data. The destructor removes the folder.
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
