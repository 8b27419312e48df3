// Tier 2: torch/optim/optimizer.h. What a FusedOptimizer keeps for CUDA graphs.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ddpkit/optim/fused_optimizer.h>

namespace ddpkit::optim {

struct FusedOptimizer::Capture {
  /// A number of the host in memory of a device.
  struct Number {
    at::Tensor tensor;
    double value = 0;
  };
  std::map<std::pair<std::size_t, at::DeviceIndex>, Number> learning_rates;  ///< By group and device.
  std::unordered_map<const void*, at::Tensor> steps;                         ///< By parameter.

  bool capturing = false;
  std::vector<at::Tensor> parameters;  ///< That the captured steps update; once for each step.
  std::vector<const void*> places;     ///< Where their memory began. [parameters]
  const Layout* layout = nullptr;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;  ///< [group]
};

}  // namespace ddpkit::optim
