// The stored cases: faults found so far. A case of an unfixed fault lists the fault's verdicts.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "case.h"
#include "judge.h"

namespace ddpkit::fuzz {

struct StoredCase {
  std::string name = {};                ///< The file name without .json.
  std::string about = {};               ///< Description of the fault.
  std::vector<std::string> known = {};  ///< Verdicts while the fault is not fixed; empty: the case must be right.
  Case drawn = {};
};

/// Reads a file, or all files of a folder. A file without "case" is a case itself.
std::vector<StoredCase> read_stored(const std::filesystem::path& path);

/// Returns whether `verdict` is one of the known case's. A wrong value may first appear in a weight or between ranks.
bool is_known(const StoredCase& stored, const Verdict& verdict);

/// Returns the name of the known case that explains why `drawn` fails with `verdict`; empty if there is none. A known
/// case explains it if `drawn` has all its features and its verdict, and is right after one of these features is
/// removed. If it still fails then, another known case must explain the rest.
std::string explain(const Case& drawn, const Verdict& verdict, const std::vector<StoredCase>& stored,
                    const std::function<Verdict(const Case&)>& run, int depth = 3);

}  // namespace ddpkit::fuzz
