// The verdict on a case's reports.
#pragma once

#include <string>
#include <vector>

#include "case.h"
#include "report.h"

namespace ddpkit::fuzz {

/// PASS, REFUSED (as the contract allows) and ALIKE (LibTorch fails without ddpkit too) are right. All others are
/// faults.
///   WRONG ...   a value differs from the reference: WRONG weight, gradient, buffer, state, norm, or entries
///   BITS        ranks differ, though each is within the tolerance
///   ACCEPTED    the reference fails, the ranks do not
///   UNEXPECTED  an Error on all ranks that the contract does not list
///   SOME        an error on some ranks only
///   UNNAMED     an error that does not come from ddpkit
///   HANG, CRASH
struct Verdict {
  std::string kind;
  std::string detail;
  bool is_fault() const { return kind != "PASS" && kind != "REFUSED" && kind != "ALIKE"; }
};

/// `reports`: of the ranks that ran. [rank] `references`: of all ranks, see run_reference(). [run][rank]
Verdict judge(const Case& drawn, const std::vector<Report>& reports,
              const std::vector<std::vector<Report>>& references);

/// Relative rounding errors of the case's coarsest types.
struct Rounding {
  static constexpr double kOfDouble = 0x1p-52;
  double values = 0;     ///< Of activations and weights.
  double gradients = 0;  ///< Of averaged gradients.
};
Rounding rounding_of(const Case& drawn);

/// Returns whether the documentation permits the error `message` for `drawn`. See contract.cpp.
bool may_refuse(const Case& drawn, const std::string& message);

}  // namespace ddpkit::fuzz
