// Tier 0: the standard library only.
#pragma once

#include <string>
#include <vector>

#include <ddpkit/scaling/estimate.h>

#include "links.h"
#include "published.h"

namespace ddpkit::cli {

/// What `ddpkit estimate` prints: a line on the step of one device, and a row for each number of devices, with hours
/// and cost where they are known.
std::string estimate_table(const scaling::StepProfile& profile, const LinkModel& links,
                           const std::vector<scaling::TrainingEstimate>& estimates);

/// The same as one JSON object on one line.
std::string estimate_json(const scaling::StepProfile& profile, const LinkModel& links,
                          const std::vector<scaling::TrainingEstimate>& estimates);

/// An SVG document: speed-up over devices, beside the ideal line.
std::string estimate_plot(const LinkModel& links, const std::vector<scaling::TrainingEstimate>& estimates);

/// Each published point with the prediction and its error.
std::string published_table(const std::vector<PublishedPoint>& points);

}  // namespace ddpkit::cli
