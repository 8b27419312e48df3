// Tier 0: the standard library only.
#pragma once

#include <filesystem>
#include <optional>

#include "har/recordings.h"

namespace har {

/// The problem in `folder`: "NAME" where it holds NAME_TRAIN.ts (NAME_TEST.ts is read with it). Of several, the one
/// named like the folder; empty when there is none. Throws ddpkit::InvalidArgument when it is not clear which is meant.
std::optional<std::string> find_ts_problem(const std::filesystem::path& folder);

/// Reads NAME_TRAIN.ts and NAME_TEST.ts in the text format of the UEA archive and sktime
/// (https://www.sktime.net/en/stable/api_reference/file_specifications/ts.html): a header of @-lines, then a case a
/// line, its channels parted by ':', the class label last. '?' is a missing value (NaN). Cases of unequal length, where
/// the header admits them, are padded with missing values. No timestamps, no regression targets. Throws
/// ddpkit::InvalidArgument with file and line for whatever is missing, malformed or contradicts the header.
RecordingSet read_ts(const std::filesystem::path& folder, const std::string& name);

}  // namespace har
