// Tests that the launcher names the rank that failed first, and not a rank that lost its connection.
#pragma once

#include <string>
#include <vector>

namespace ddpkit::testing {

/// The way in which a rank ends, and the launcher's report.
struct Way {
  std::string name;
  int exit_code = 0;
  std::string words = {};
};

extern const std::vector<Way> kWays;

/// Starts `runs` runs on a busy machine. Each must report the correct rank, exit code and time.
void check_blame(const Way& way, const std::string& backend, int runs);

}  // namespace ddpkit::testing
