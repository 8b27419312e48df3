// Tier 0: the standard library only.
#pragma once

#include <string>
#include <vector>

namespace ddpkit::cli {

/// A published measurement and the model's prediction.
struct PublishedPoint {
  std::string curve;  ///< The name and the source.
  std::string what;   ///< "64 KiB", "resnet50, 8 GPUs".
  std::string unit;
  double measured = 0;
  double predicted = 0;

  double error() const noexcept { return predicted / measured - 1; }
};

/// Returns predictions of ddpkit::scaling for three published curves: all-reduce on eight H100, PyTorch's
/// DistributedDataParallel benchmark on V100, and nanotron's pure data-parallel curve. docs/scaling.md lists the
/// sources and assumptions.
std::vector<PublishedPoint> published_points();

}  // namespace ddpkit::cli
