#include "trainer_program.h"

#include <fmt/format.h>
#include <unistd.h>

#include <sstream>
#include <system_error>

#include <ddpkit/comm/environment.h>
#include <ddpkit/error.h>
#include <ddpkit/launch/launcher.h>

namespace ddpkit::bench {

std::vector<std::string> on_own_core(std::vector<std::string> command, int ranks) {
  const std::vector<std::string> pin = {"sh", "-c", R"(exec taskset -c $LOCAL_RANK "$@")", "sh"};
  if (ranks <= available_cores()) command.insert(command.begin(), pin.begin(), pin.end());
  return command;
}

std::vector<nlohmann::json> run_trainer(const std::vector<std::string>& command, int ranks) {
  std::string output, errors;
  const LaunchResult result =
      ddpkit::launch({.command = command,
                      .ranks = ranks,
                      .environment = {{"OMP_NUM_THREADS", "1"}},
                      .time_limit = std::chrono::minutes(10),
                      .on_output = [&](int rank, const std::string& text) { (rank == 0 ? output : errors) += text; }});
  std::string what;
  for (const std::string& word : command) what += what.empty() ? word : " " + word;
  if (result.exit_code() != 0)
    throw Error(fmt::format("'{}' ended with code {}: {}", what, result.exit_code(), output + errors));
  std::istringstream lines(output);
  std::vector<nlohmann::json> objects;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("{")) objects.push_back(nlohmann::json::parse(line));
  }
  if (objects.empty()) throw Error(fmt::format("'{}' printed no figures: {}", what, output + errors));
  return objects;
}

TemporaryData::TemporaryData(const std::string& name)
    : folder_(std::filesystem::temp_directory_path() / fmt::format("ddpkit-bench-{}-{}", name, ::getpid())) {}

TemporaryData::~TemporaryData() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

}  // namespace ddpkit::bench
