// Tier 0: the standard library only.
#pragma once

#include <string>
#include <vector>

namespace ddpkit::cli {

enum class Severity {
  kFine,     ///< Correct, or information.
  kAdvice,   ///< Training works but can be improved.
  kProblem,  ///< Training cannot start, or not with these settings.
};

/// One check of `ddpkit doctor`.
struct Finding {
  std::string section;  ///< "host", "GPUs", "network", "all-reduce", "model".
  Severity severity = Severity::kFine;
  std::string what;         ///< One sentence, with the value.
  std::string advice = {};  ///< The action; empty if none is needed.
  double gain = 0;          ///< Approximate speed-up of training. Sorts the advice.
};

using Findings = std::vector<Finding>;

/// Returns the report: the sections, then the actions: problems first, then advice by gain.
std::string doctor_report(const Findings& findings);
/// Returns the findings as one JSON object on one line.
std::string doctor_json(const Findings& findings);
bool can_train(const Findings& findings);

}  // namespace ddpkit::cli
