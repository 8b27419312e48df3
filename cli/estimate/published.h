// Tier 0: the standard library only.
#pragma once

#include <string>
#include <vector>

namespace ddpkit::cli {

/// One point of a curve that somebody has measured and published, beside what the model says.
struct PublishedPoint {
  std::string curve;  ///< Which, and where it stands.
  std::string what;   ///< "64 KiB", "resnet50, 8 GPUs".
  std::string unit;
  double measured = 0;
  double predicted = 0;

  double error() const noexcept { return predicted / measured - 1; }
};

/// All-reduce on eight H100, the DistributedDataParallel table of PyTorch's own benchmark on V100, and nanotron's pure
/// data-parallel curve, predicted by ddpkit::scaling. docs/scaling.md says where each comes from and what was assumed.
std::vector<PublishedPoint> published_points();

}  // namespace ddpkit::cli
