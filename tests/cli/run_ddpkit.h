// Runs the `ddpkit` command.
#pragma once

#include <filesystem>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <ddpkit/launch/launcher.h>

#include "support/catch.h"
#include "support/folder.h"

namespace ddpkit::testing {

inline std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, at);) parts.push_back(part);
  return parts;
}

struct Run {
  int exit_code = -1;
  std::vector<std::string> lines;  ///< Lines of stdout.
  std::string errors;
};

/// `folder` holds its stderr during the run.
inline Run run_ddpkit(const Folder& folder, const std::vector<std::string>& arguments,
                      const std::vector<std::pair<std::string, std::string>>& environment = {}) {
  const std::string errors = folder / "errors";
  std::vector<std::string> command = {"sh", "-c", R"(exec "$0" "$@" 2> ")" + errors + '"', DDPKIT_TEST_CLI};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::string output;
  const auto result = ddpkit::launch({.command = command,
                                      .environment = environment,
                                      .time_limit = std::chrono::seconds(200),
                                      .on_output = [&](int, const std::string& text) { output += text; }});
  REQUIRE_FALSE(result.timed_out);
  Run run{result.exit_code(), split(output, '\n'), read_file(errors)};
  std::filesystem::remove(errors);
  return run;
}

inline Run run_bench(const Folder& folder, std::vector<std::string> arguments,
                     const std::vector<std::pair<std::string, std::string>>& environment = {}) {
  arguments.insert(arguments.begin(), "bench");
  return run_ddpkit(folder, arguments, environment);
}

}  // namespace ddpkit::testing
