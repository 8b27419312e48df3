// The stored cases: faults that have been found. A fault not yet fixed is marked as known by its verdict.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "case.h"
#include "judge.h"

namespace ddpkit::fuzz {

struct StoredCase {
  std::string name = {};                ///< The file's, without .json.
  std::string about = {};               ///< What was, or is, wrong.
  std::vector<std::string> known = {};  ///< Verdicts while the fault is not fixed; empty: the case must be right.
  Case drawn = {};
};

/// A file, or all files of a folder. A file that holds no "case" is a case itself.
std::vector<StoredCase> read_stored(const std::filesystem::path& path);

/// Whether `verdict` is one of the known case's. A wrong value may be seen first in a weight or between ranks.
bool is_known(const StoredCase& stored, const Verdict& verdict);

/// The name of the known case that explains why `drawn` fails as `verdict` says; empty: none does. It explains it when
/// `drawn` has all features and the verdict of the known case, and is right once one of these features is taken out. Of
/// a case that fails then too, another known case must explain why.
std::string explain(const Case& drawn, const Verdict& verdict, const std::vector<StoredCase>& stored,
                    const std::function<Verdict(const Case&)>& run, int depth = 3);

}  // namespace ddpkit::fuzz
