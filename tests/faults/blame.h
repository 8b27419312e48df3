// Whether the launcher names the rank that failed first, and not one that lost it.
#pragma once

#include <string>
#include <vector>

namespace ddpkit::testing {

/// How a rank ends, and what the launcher reports.
struct Way {
  std::string name;
  int exit_code = 0;
  std::string words = {};
};

extern const std::vector<Way> kWays;

/// Of `runs` runs on a busy machine, each must report the right rank, exit code and time.
void check_blame(const Way& way, const std::string& backend, int runs);

}  // namespace ddpkit::testing
