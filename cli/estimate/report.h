// Tier 0: the standard library only.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ddpkit/scaling/estimate.h>

#include "links.h"
#include "published.h"

namespace ddpkit::cli {

/// Where devices begin to be wasted: the first power of two of them at which efficiency is below 80 and below 50 %, up
/// to the most that `links` describes; 0: nowhere. Nothing for links that are known for one number of devices alone.
struct Limits {
  int below_80 = 0, below_50 = 0;
};
std::optional<Limits> limits_of(const scaling::StepProfile& profile, const LinkModel& links,
                                const scaling::StepOptions& options);

/// What `ddpkit estimate` prints: a line on the step of one device, a row for each number of devices, with hours and
/// cost where they are known, and where devices begin to be wasted.
std::string estimate_table(const scaling::StepProfile& profile, const LinkModel& links,
                           const std::vector<scaling::TrainingEstimate>& estimates,
                           const std::optional<Limits>& limits);

/// The same as one JSON object on one line.
std::string estimate_json(const scaling::StepProfile& profile, const LinkModel& links,
                          const std::vector<scaling::TrainingEstimate>& estimates, const std::optional<Limits>& limits);

/// An SVG document: speed-up over devices, beside the ideal line.
std::string estimate_plot(const LinkModel& links, const std::vector<scaling::TrainingEstimate>& estimates);

/// Each published point with the prediction and its error.
std::string published_table(const std::vector<PublishedPoint>& points);

}  // namespace ddpkit::cli
