// Tier 0: the standard library only.
#pragma once

#include <string>
#include <vector>

namespace ddpkit::cli {

enum class Severity {
  kFine,     ///< As it should be, or worth knowing.
  kAdvice,   ///< Training works, but could be better.
  kProblem,  ///< Training cannot start, or not in this way.
};

/// One thing that `ddpkit doctor` has looked at.
struct Finding {
  std::string section;  ///< "host", "GPUs", "network", "all-reduce", "model".
  Severity severity = Severity::kFine;
  std::string what;         ///< One sentence, with the value.
  std::string advice = {};  ///< What to do about it; empty when there is nothing to do.
  double gain = 0;          ///< By which advice is sorted: about how many times as fast training gets.
};

using Findings = std::vector<Finding>;

/// What people read: the sections, then what to do, problems first and advice by gain.
std::string doctor_report(const Findings& findings);
/// The same as one JSON object on one line.
std::string doctor_json(const Findings& findings);
bool can_train(const Findings& findings);

}  // namespace ddpkit::cli
