// Tier 0: the standard library only.
#pragma once

#include <filesystem>
#include <optional>

#include "har/recordings.h"

namespace har {

/// Returns the problem in `folder`: "NAME" if it holds NAME_TRAIN.ts (read together with NAME_TEST.ts). If there are
/// several, returns the problem with the name of the folder; empty if there is none. Throws ddpkit::InvalidArgument if
/// the choice is ambiguous.
std::optional<std::string> find_ts_problem(const std::filesystem::path& folder);

/// Reads NAME_TRAIN.ts and NAME_TEST.ts in the text format of the UEA archive and sktime
/// (https://www.sktime.net/en/stable/api_reference/file_specifications/ts.html): a header of @-lines, then one case per
/// line, its channels separated by ':', the class label last. '?' is a missing value (NaN). If the header allows cases
/// of unequal length, pads them with missing values. Does not support timestamps and regression targets. Throws
/// ddpkit::InvalidArgument with file and line for missing, malformed or contradictory input.
RecordingSet read_ts(const std::filesystem::path& folder, const std::string& name);

}  // namespace har
