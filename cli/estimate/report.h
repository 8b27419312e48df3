// Tier 0: the standard library only.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ddpkit/scaling/estimate.h>
#include <ddpkit/scaling/memory.h>

#include "links.h"
#include "published.h"

namespace ddpkit::cli {

/// The first power of two of devices with an efficiency below 80 % and below 50 %; 0: none up to the maximum of
/// `links`. Not computed if `links` is valid for only one number of devices.
struct Limits {
  int below_80 = 0, below_50 = 0;
};
std::optional<Limits> limits_of(const scaling::StepProfile& profile, const LinkModel& links,
                                const scaling::StepOptions& options);

/// Returns the output of `ddpkit estimate`: a line for the step of one device, and one row per number of devices. Rows
/// have hours and cost if known. The last line has the numbers of devices with low efficiency.
std::string estimate_table(const scaling::StepProfile& profile, const LinkModel& links,
                           const std::vector<scaling::TrainingEstimate>& estimates,
                           const std::optional<Limits>& limits);

/// Returns a table with one row per number of devices; an empty text if `memory` is empty. [estimate]
std::string memory_table(const std::vector<scaling::TrainingEstimate>& estimates,
                         const std::vector<scaling::RankMemory>& memory);

/// Returns both tables as one JSON object on one line.
std::string estimate_json(const scaling::StepProfile& profile, const LinkModel& links,
                          const std::vector<scaling::TrainingEstimate>& estimates, const std::optional<Limits>& limits,
                          const std::vector<scaling::RankMemory>& memory);

/// Returns an SVG document: speed-up over devices, and the ideal line.
std::string estimate_plot(const LinkModel& links, const std::vector<scaling::TrainingEstimate>& estimates);

/// Returns a table of the published points with prediction and error.
std::string published_table(const std::vector<PublishedPoint>& points);

}  // namespace ddpkit::cli
